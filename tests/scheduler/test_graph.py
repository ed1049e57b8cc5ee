"""Goal: the pipeline is found from traffic, and a graph that no longer fits is stale in time.

Method: cumulative counts on a hand-driven clock.
"""

from __future__ import annotations

from shiftbook.ledger.events.job import Edge
from shiftbook.scheduler.graph import PipelineGraph

EDGES = [("rollout", "tool"), ("rollout", "inference"), ("inference", "trainer")]


def graph() -> PipelineGraph:
    return PipelineGraph(
        ("rollout", "tool", "inference", "trainer"),
        [Edge(source=a, target=b) for a, b in EDGES],
        stale_after_s=5.0,
        silent_after_s=60.0,
    )


def test_the_declared_pipeline_is_found_from_traffic() -> None:
    pipeline = graph()
    pipeline.observe(dict.fromkeys(EDGES, 0), 0.0)
    assert pipeline.event().edges == ()
    pipeline.observe(dict.fromkeys(EDGES, 3), 1.0)
    event = pipeline.event()
    assert {(edge.source, edge.target) for edge in event.edges} == set(EDGES)
    assert event.components == ("rollout", "tool", "inference", "trainer")
    assert event.matches_declared
    assert not pipeline.stale
    assert pipeline.difference() == ""


def test_traffic_that_was_not_declared_makes_the_graph_stale_only_when_it_lasts() -> None:
    pipeline = graph()
    pipeline.observe({**dict.fromkeys(EDGES, 1), ("trainer", "reward"): 1}, 1.0)
    assert not pipeline.event().matches_declared
    assert "reward" in pipeline.event().components
    pipeline.observe(dict.fromkeys(EDGES, 2), 5.0)
    assert not pipeline.stale
    pipeline.observe(dict.fromkeys(EDGES, 3), 6.5)
    assert pipeline.stale
    assert "trainer → reward carries work and is not declared" in pipeline.difference()
    for step in range(8):
        pipeline.observe(dict.fromkeys(EDGES, 4 + step), 10.0 * step + 7.0)
    assert not pipeline.stale, "the stray edge fell silent: the graph fits again"


def test_a_declared_edge_that_falls_silent_is_noticed_while_others_go_on() -> None:
    pipeline = graph()
    pipeline.observe(dict.fromkeys(EDGES, 1), 0.0)
    for second in range(1, 75):
        busy = {edge: second + 1 for edge in EDGES if edge != ("rollout", "tool")}
        pipeline.observe({**busy, ("rollout", "tool"): 1}, float(second))
    assert pipeline.silent == {("rollout", "tool")}
    assert pipeline.stale
    assert "rollout → tool is declared and silent for 60 s" in pipeline.difference()
    pipeline.observe({("rollout", "tool"): 2}, 75.0)
    assert not pipeline.stale


def test_a_pause_of_everything_and_counters_that_start_anew_are_no_difference() -> None:
    pipeline = graph()
    pipeline.observe(dict.fromkeys(EDGES, 50), 0.0)
    pipeline.observe(dict.fromkeys(EDGES, 50), 500.0)
    assert not pipeline.stale
    assert not pipeline.silent
    pipeline.observe(dict.fromkeys(EDGES, 2), 501.0)
    assert pipeline.event().matches_declared
    assert len(pipeline.found) == 3
