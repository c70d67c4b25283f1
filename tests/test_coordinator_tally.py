"""Counters, histograms and their text."""

from __future__ import annotations

from coordinator.tally import Histogram, Tally, text


def test_counters_add_up_per_label():
    tally = Tally()
    tally.count("x_total", outcome="a")
    tally.count("x_total", 2, outcome="b")
    assert (tally.value("x_total"), tally.value("x_total", outcome="b"), tally.value("y_total")) == (3, 2, 0)


def test_a_value_on_a_bound_is_in_its_bucket():
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 9.0):
        histogram.observe(value)
    buckets = [value for name, _, value in histogram.rows("h", ()) if name == "h_bucket"]
    assert buckets == [1, 2, 3] and histogram.count == 3 and histogram.sum == 11.5


def test_text_escapes_labels_and_says_types():
    tally = Tally()
    tally.count("x_total", why='a"b\\c\n')
    assert text(tally.families()) == '# TYPE x_total counter\nx_total{why="a\\"b\\\\c\\n"} 1\n'


def test_no_metrics_are_an_empty_line():
    assert text([]) == "\n"
