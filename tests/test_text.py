"""Text for people."""

from nearkin import text


def test_what_is_more_than_is_shown_is_counted():
    assert text.abridged(["a", "b"], 3) == text.abridged(["a", "b"], 2) == ["a", "b"]
    assert text.abridged(["a", "b", "c"], 2) == ["a", "b", "and 1 more"]


def test_letters_of_all_alphabets_and_line_ends_are_printed_as_they_are():
    assert text.printable("é\nж") == "é\nж"
    assert text.printable("\u202eé\udcff") == "\\u202eé\\udcff"
    for name in ("می\u200cشود", "क्\u200dष", "👩\u200d🔬", "全角\u3000空白", "10.00\u202fAM"):
        assert text.printable(name) == name
    assert text.printable("cat\u200c") == "cat\\u200c"  # which would look like another name
