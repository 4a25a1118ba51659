"""Terms of code: an identifier, its parts, and scripts without spaces."""

from __future__ import annotations

from cato.serve.nodes.terms import terms_of


def test_splits_identifiers_into_terms() -> None:
    assert terms_of("parseHTTPHeader") == ["parsehttpheader", "parse", "http", "header"]
    assert terms_of("__init_subclass__") == ["__init_subclass__", "init", "subclass"]
    assert terms_of("x + y1 == 'straße'") == ["y1", "straße"]
    assert terms_of("解析请求 header") == ["解析", "析请", "请求", "header"]
