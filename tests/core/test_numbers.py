"""Words of the environment as numbers."""

import pytest

from burnish.utils.environment import count_in, number_in


@pytest.mark.parametrize(("text", "count"), [("4", 4), (" 12 ", 12), ("", 7), ("-1", 7), ("two", 7), ("²", 7)])
def test_a_count_is_read_and_anything_else_is_the_usual_one(text, count):
    assert count_in(text, 7) == count


@pytest.mark.parametrize(("text", "number"), [("1e3", 1000.0), ("90", 90.0), ("soon", None), ("", None)])
def test_a_number_is_read_and_anything_else_is_none(text, number):
    assert number_in(text) == number
