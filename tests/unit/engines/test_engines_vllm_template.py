"""What the renderings of a chat template tell about it."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from cato.core.topology import TemplateFacts
from cato.engines.vllm.template import (
    Body,
    late_probe,
    lost_parts,
    system_probe,
    template_facts,
    whole_probe,
)

SYSTEM_FIRST = (
    "{{ messages[0].content }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages[1:] %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
TOOLS_FIRST = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NO_LATE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ refuse() }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
MERGED = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
NO_TOOLS_ALLOWED = "{% if tools %}{{ refuse() }}{% endif %}" + TOOLS_FIRST


class RefusedError(Exception):
    pass


def rendered(template: str, probe: Body) -> str | None:
    def refuse() -> Any:
        raise RefusedError

    try:
        return jinja2.Template(template).render(**probe, refuse=refuse)
    except RefusedError:
        return None


@pytest.mark.parametrize(
    ("template", "tools", "system", "system_first", "late", "lost"),
    [
        (SYSTEM_FIRST, True, True, True, True, ""),
        (TOOLS_FIRST, True, True, False, True, ""),
        (NO_SYSTEM, False, False, False, False, "tools and system texts"),
        (NO_LATE_SYSTEM, False, True, True, False, "tools"),
        (MERGED, False, True, True, False, "tools"),
        (NO_TOOLS_ALLOWED, False, True, True, True, "tools"),
    ],
)
def test_facts_follow_from_what_is_rendered(
    template: str, tools: bool, system: bool, system_first: bool, late: bool, lost: str
) -> None:
    probes = (whole_probe(), system_probe(), late_probe())
    facts = template_facts(*(rendered(template, probe) for probe in probes))
    assert facts == TemplateFacts(tools, system, system_first, late)
    assert lost_parts(facts) == lost


def test_a_model_without_a_template_has_no_facts() -> None:
    assert template_facts(None, None, None) is None
