from tests.unit.shipped import FILE, text


def test_the_page_lists_what_there_is() -> None:
    assert FILE.read_text(encoding="utf-8") == text(), "python -m tests.unit.shipped"
