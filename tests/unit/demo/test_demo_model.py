"""The shipped demo model is whole, and its training samples lose no text."""

import ast
import json
import struct
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cato.demo import demo_model_path
from cato.lab.demo_model.corpus import SourceFile, epoch_samples, standard_library
from cato.lab.demo_model.fim_samples import (
    CHAT_END,
    CHAT_START,
    END_OF_TEXT,
    FIM_MIDDLE,
    FIM_PREFIX,
    FIM_SUFFIX,
    SPECIAL_TOKENS,
    chat_pairs,
    cut_like_an_editor,
    without_suffix,
)

MAX_WEIGHT_BYTES = 10_000_000  # the package must stay small enough for an index

A_DOCUMENT = '''\
def area(width, height):
    """Return the area of a rectangle."""
    if width < 0 or height < 0:
        raise ValueError("negative side")
    return width * height


def describe(shape):
    print(shape.name, area(shape.width, shape.height))
'''


def shipped_json(name: str) -> Any:
    return json.loads((demo_model_path() / name).read_text(encoding="utf-8"))


def test_the_folder_holds_what_an_engine_and_a_reader_need() -> None:
    names = {path.name for path in demo_model_path().iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "README.md",
    }
    assert not [name for name in names if name.endswith(".part")]


def test_the_weights_are_small_and_readable_by_other_users() -> None:
    status = (demo_model_path() / "model.safetensors").stat()
    assert 1_000_000 < status.st_size < MAX_WEIGHT_BYTES
    assert status.st_mode & 0o044 == 0o044


def test_the_weights_file_has_the_tensors_of_the_configuration() -> None:
    config = shipped_json("config.json")
    with (demo_model_path() / "model.safetensors").open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
    assert header["model.embed_tokens.weight"]["shape"] == [
        config["vocab_size"],
        config["hidden_size"],
    ]
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    assert {entry["dtype"] for entry in tensors.values()} == {"BF16"}
    assert len(tensors) == 2 + 9 * config["num_hidden_layers"]


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_a_special_token_is_one_id_in_the_tokenizer(token: str) -> None:
    added = {entry["content"]: entry for entry in shipped_json("tokenizer.json")["added_tokens"]}
    assert added[token]["special"]
    assert added[token]["id"] == SPECIAL_TOKENS.index(token)


def test_generation_stops_at_the_end_of_text() -> None:
    end = SPECIAL_TOKENS.index(END_OF_TEXT)
    assert shipped_json("generation_config.json")["eos_token_id"] == end
    assert shipped_json("config.json")["eos_token_id"] == end


def test_the_chat_template_opens_the_assistants_turn_and_drops_system_text() -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Template(shipped_json("tokenizer_config.json")["chat_template"])
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Return the sum of a list."},
    ]
    assert template.render(messages=messages, add_generation_prompt=True) == (
        f"{CHAT_START}user\nReturn the sum of a list.{CHAT_END}\n{CHAT_START}assistant\n"
    )


@given(
    document=st.text(st.sampled_from("ab_.(:) \n\té€"), max_size=200) | st.just(A_DOCUMENT),
    seed=st.integers(0, 2**32),
)
def test_the_three_parts_of_a_cut_join_to_the_document(document: str, seed: int) -> None:
    sample = cut_like_an_editor(document, Random(seed))
    assert sample.prefix + sample.middle + sample.suffix == document
    assert sample.middle or not document.strip()


@given(seed=st.integers(0, 2**32))
def test_a_cut_depends_on_nothing_but_document_and_seed(seed: int) -> None:
    once, again = (cut_like_an_editor(A_DOCUMENT, Random(seed)) for _ in range(2))
    assert once == again


def test_most_middles_end_where_a_line_ends() -> None:
    cuts = [cut_like_an_editor(A_DOCUMENT, Random(seed)) for seed in range(400)]
    at_line_end = sum(cut.suffix.startswith("\n") for cut in cuts)
    assert at_line_end > 0.8 * len(cuts)


def test_a_cut_at_the_end_of_the_file_keeps_prefix_and_middle() -> None:
    cut = cut_like_an_editor(A_DOCUMENT, Random(1))
    at_the_end = without_suffix(cut)
    assert (at_the_end.prefix, at_the_end.middle) == (cut.prefix, cut.middle)
    assert at_the_end.suffix == ""


def test_chat_requests_come_from_docstrings_and_replies_parse() -> None:
    pairs = [pair for seed in range(20) for pair in chat_pairs(A_DOCUMENT, Random(seed))]
    replies = [pair.reply for pair in pairs if "Explain" not in pair.request]
    assert replies
    assert all("area of a rectangle" in pair.request + pair.reply for pair in pairs)
    assert all(ast.parse(reply) for reply in replies)


def test_an_epoch_covers_every_file_with_a_good_share_of_fill_in_the_middle() -> None:
    files = [SourceFile(f"m{i}.py", A_DOCUMENT * 40) for i in range(8)]
    samples = list(epoch_samples(files, window_tokens=512, rng=Random(0)))
    fim = [s.pieces for s in samples if s.pieces[0] == FIM_PREFIX]
    assert all(p[2] == FIM_SUFFIX and p[4] == FIM_MIDDLE and p[-1] == END_OF_TEXT for p in fim)
    chat = [s.pieces for s in samples if s.pieces[0].startswith(CHAT_START)]
    fim_chars, chat_chars, all_chars = (
        sum(len(piece) for pieces in group for piece in pieces)
        for group in (fim, chat, [s.pieces for s in samples])
    )
    assert 0.3 < fim_chars / (all_chars - chat_chars) < 0.7


def test_the_corpus_is_library_code_without_tests() -> None:
    paths = {file.path for file in standard_library()}
    assert "json/decoder.py" in paths
    assert not [path for path in paths if "/test/" in f"/{path}" or "site-packages" in path]
