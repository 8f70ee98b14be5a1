"""Parse environment variables as numbers."""

import pytest

from burnish.utils.environment import count_in, number_in


@pytest.mark.parametrize(("text", "count"), [("4", 4), (" 12 ", 12), ("", 7), ("-1", 7), ("two", 7), ("²", 7)])
def test_integer_is_parsed_or_default_is_used(text, count):
    assert count_in(text, 7) == count


@pytest.mark.parametrize(("text", "number"), [("1e3", 1000.0), ("90", 90.0), ("soon", None), ("", None)])
def test_number_is_parsed_or_none_is_returned(text, number):
    assert number_in(text) == number
