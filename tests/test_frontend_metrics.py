"""The metrics page."""

from front_kit import Bench, in_loop, model_folder, replies
from prometheus_client.parser import text_string_to_metric_families

from coordinator.frontend.metrics import merge


def values(reply):
    families = list(text_string_to_metric_families(reply.body.decode()))
    assert len({family.name for family in families}) == len(families)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


@in_loop
async def test_the_page_holds_the_core_s_metrics_and_this_process_s(tmp_path):
    made = Bench(model_folder(tmp_path))
    made.core.script = replies(50)
    await made.complete()
    await made.complete(n=0)
    await made.get("/made/up")
    found = values(await made.get("/metrics"))
    labels = (("process", "front-0"), ("route", "/v1/completions"))
    assert found["pdserve_requests_started_total", ()] == 3
    assert found["pdserve_core_up", ()] == 1
    assert found["pdserve_http_requests_total", (*labels, ("status", "200"))] == 1
    assert found["pdserve_http_requests_total", (*labels, ("status", "400"))] == 1
    assert found["pdserve_http_request_seconds_count", labels] == 2
    assert found["pdserve_http_open", (("process", "front-0"),)] == 1


@in_loop
async def test_unknown_addresses_share_one_label(tmp_path):
    made = Bench(model_folder(tmp_path))
    for path in ("/a", "/b", "/v1/models/a", "/v1/models/b"):
        await made.get(path)
    routes = {dict(labels).get("route") for _, labels in values(await made.get("/metrics"))}
    assert routes == {"other", "/v1/models/", None}


@in_loop
async def test_without_the_core_the_page_says_so(tmp_path):
    made = Bench(model_folder(tmp_path))
    made.core.is_connected = False
    assert values(await made.get("/metrics"))["pdserve_core_up", ()] == 0


@in_loop
async def test_clients_that_left_are_counted(tmp_path):
    made = Bench(model_folder(tmp_path))
    call = made.call("POST", "/v1/completions", {"model": "tiny", "prompt": "hello"})
    await made.core.arrived.wait()
    call.leave()
    await call.done()
    found = values(await made.get("/metrics"))
    assert found["pdserve_http_clients_left_total", (("process", "front-0"),)] == 1
    labels = (("process", "front-0"), ("route", "/v1/completions"), ("status", "none"))
    assert found["pdserve_http_requests_total", labels] == 1


def test_a_family_in_two_texts_appears_once():
    core = '# HELP lag How late\n# TYPE lag gauge\nlag{process="core"} 1\nother 2\n'
    front = '# HELP lag How late\n# TYPE lag gauge\nlag{process="front"} 3\n'
    assert merge(core, front) == (
        '# HELP lag How late\n# TYPE lag gauge\nlag{process="core"} 1\nlag{process="front"} 3\nother 2\n'
    )


def test_histogram_lines_stay_with_their_heading():
    text = '# TYPE h histogram\nh_bucket{le="1"} 1\nh_sum 1\nh_count 1\n'
    assert merge(text, "") == text
