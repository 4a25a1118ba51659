"""Copies of values on hot paths."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kits.builders import an_invocation

from cato.core.events import InvocationEnded
from cato.core.ids import InvocationId
from cato.core.length import LengthBelief
from cato.core.record import changed


def test_a_changed_copy_equals_that_of_dataclasses() -> None:
    call = replace(an_invocation("i"), length=LengthBelief((1.0, 2.0)))
    now = {"arrived_at_s": 3.0, "prefix": (1, 2)}
    assert changed(call, **now) == replace(call, **now)  # type: ignore[arg-type]
    assert call.arrived_at_s == 0.0, "the original stays"
    assert changed(InvocationEnded(0.0, InvocationId("i"), 1, 2, "done"), now_s=5.0).now_s == 5.0


def test_an_unknown_field_cannot_be_changed() -> None:
    with pytest.raises(KeyError):
        changed(an_invocation("i"), arrives_at_s=1.0)
