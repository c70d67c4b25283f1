"""What a client may send: one test for each rule about fields."""

import dataclasses
import math

import pytest

from coordinator.frontend.http import parse_object
from coordinator.frontend.validate import Model, parse
from pdserve.errors import NotFoundError, RequestError

MODEL = Model(served_names=("tiny", "alias"), vocab_size=512, eos_token_ids=(2,), max_model_len=128)
USER = [{"role": "user", "content": "hi"}]


def completion(**fields):
    return parse("completion", {"model": "tiny", "prompt": "hi", **fields}, MODEL)


def chat(**fields):
    return parse("chat", {"model": "tiny", "messages": USER, **fields}, MODEL)


def refused(call, **fields):
    with pytest.raises(RequestError) as caught:
        call(**fields)
    return caught.value


# --- model -----------------------------------------------------------------------------------------------------------


def test_every_served_name_is_a_model():
    assert completion(model="alias").model == "alias"


def test_an_absent_model_is_refused():
    error = refused(completion, model=None)
    assert (error.status, error.param) == (400, "model")


def test_an_unknown_model_is_not_found():
    error = refused(completion, model="gpt-4")
    assert isinstance(error, NotFoundError)
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize("model", [1, True, [], {"a": 1}])
def test_a_model_that_is_no_text_is_refused(model):
    assert refused(completion, model=model).status == 400


def test_an_unknown_model_with_broken_text_is_answered():
    assert refused(completion, model="\ud800").message.encode()


# --- defaults --------------------------------------------------------------------------------------------------------


def test_the_defaults_are_the_documented_ones():
    sampling = completion().sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.n) == (1, 1, 0, 0, 1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0, 0, 1)
    assert (sampling.num_logprobs, sampling.min_tokens, sampling.ignore_eos) == (-1, 0, False)
    assert sampling.eos_token_ids == (2,)


OPTIONAL = [
    "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "max_tokens", "min_tokens",
    "max_completion_tokens", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos",
    "stream", "stream_options", "include_phases", "priority", "return_token_ids", "cache_salt", "slo", "logprobs",
    "echo", "suffix", "best_of", "user", "tools", "response_format", "made_up",
]  # fmt: skip


def test_null_is_the_same_as_absent():
    assert completion(**dict.fromkeys(OPTIONAL)) == completion()


# --- numbers ---------------------------------------------------------------------------------------------------------

RANGES = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 10),
}


@pytest.mark.parametrize("name", RANGES)
def test_the_bounds_of_a_number_are_allowed(name):
    for bound in RANGES[name]:
        assert getattr(completion(**{name: bound}).sampling, name) == bound


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("value", ["1", True, False, [], {}, math.nan, math.inf, -math.inf, 10.5, -3, 10**400])
def test_what_is_no_number_in_range_is_refused_by_name(name, value):
    error = refused(completion, **{name: value})
    assert (error.status, error.param) == (400, name)


@pytest.mark.parametrize("raw", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("name", RANGES)
def test_numbers_that_json_does_not_have_are_refused(name, raw):
    with pytest.raises(RequestError) as caught:
        completion(**parse_object(f'{{"{name}": {raw}}}'.encode()))
    assert caught.value.status == 400


@pytest.mark.parametrize("temperature", [0, 1e-4, 2.0])
def test_small_temperatures_are_taken_as_they_are(temperature):
    assert completion(temperature=temperature).sampling.temperature == temperature


def test_top_p_zero_is_allowed():
    assert completion(top_p=0).sampling.top_p == 0


@pytest.mark.parametrize(("sent", "kept"), [(-1, 0), (0, 0), (1, 1), (511, 511), (512, 0), (10**9, 0)])
def test_top_k_beyond_the_vocabulary_is_off(sent, kept):
    assert completion(top_k=sent).sampling.top_k == kept


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0), ("n", 9), ("n", 10**8), ("n", -1), ("n", 1.0), ("n", True), ("n", "2"),
        ("top_k", -2), ("top_k", 1.5), ("top_k", True),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.0), ("max_tokens", True), ("max_tokens", "5"),
        ("max_completion_tokens", 0), ("min_tokens", -1), ("min_tokens", 0.5),
        ("seed", 2**64), ("seed", -(2**63) - 1), ("seed", 1.5), ("seed", True), ("seed", "x"),
        ("priority", 1.5), ("priority", True), ("priority", 2**40),
    ],
)  # fmt: skip
def test_what_is_no_integer_in_range_is_refused_by_name(name, value):
    assert refused(completion, **{name: value}).param == name


@pytest.mark.parametrize("name", ["stream", "ignore_eos", "include_phases", "return_token_ids"])
@pytest.mark.parametrize("value", [1, 0, "true", [], {}])
def test_what_is_neither_true_nor_false_is_refused_by_name(name, value):
    assert refused(completion, **{name: value}).param == name


@pytest.mark.parametrize(("seed", "kept"), [(0, 0), (7, 7), (2**64 - 1, 2**64 - 1), (-1, 2**64 - 1), (None, None)])
def test_a_seed_is_kept_as_64_bits(seed, kept):
    assert completion(seed=seed).seed == kept


def test_n_up_to_eight_is_served():
    assert [completion(n=n).num_choices for n in (1, 8)] == [1, 8]


# --- max_tokens ------------------------------------------------------------------------------------------------------


def test_absent_max_tokens_stays_open():
    assert completion().max_tokens is None


def test_max_completion_tokens_is_max_tokens():
    parsed = chat(max_completion_tokens=5)
    assert (parsed.max_tokens, parsed.max_tokens_name) == (5, "max_completion_tokens")


def test_both_and_equal_is_fine():
    assert chat(max_completion_tokens=5, max_tokens=5).max_tokens == 5


def test_both_and_different_is_refused():
    assert refused(chat, max_completion_tokens=5, max_tokens=6).status == 400


def test_min_tokens_up_to_max_tokens():
    assert completion(min_tokens=3, max_tokens=3).sampling.min_tokens == 3
    assert refused(completion, min_tokens=4, max_tokens=3).param == "min_tokens"


# --- stop ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "kept"),
    [(None, ()), ([], ()), ("X", ("X",)), (["X", "Y"], ("X", "Y")), (["X", "X"], ("X",)), ("🦊" * 1024, ("🦊" * 1024,)),
     (["a", "b", "c", "d"], ("a", "b", "c", "d"))],
)  # fmt: skip
def test_stop_is_none_a_string_or_a_short_list(sent, kept):
    assert completion(stop=sent).stop == kept


@pytest.mark.parametrize(
    "stop", ["", [""], ["a", ""], list("abcde"), [None], [1], [True], {}, 1, True, "x" * 10_000, ["\ud800"], [["a"]]]
)
def test_other_stops_are_refused(stop):
    assert refused(completion, stop=stop).param == "stop"


def test_half_a_million_stop_strings_are_refused_without_looking_at_them():
    assert refused(completion, stop=["a"] * 500_000).param == "stop"


def test_stop_token_ids_are_kept():
    assert completion(stop_token_ids=[5, 511]).sampling.stop_token_ids == (5, 511)


@pytest.mark.parametrize("ids", [[512], [-1], [True], [1.0], ["1"], 5, "5", [None], list(range(129))])
def test_stop_token_ids_outside_the_vocabulary_are_refused(ids):
    assert refused(completion, stop_token_ids=ids).param == "stop_token_ids"


# --- logit_bias ------------------------------------------------------------------------------------------------------


def test_logit_bias_is_kept_by_token():
    assert completion(logit_bias={"5": -100, "6": 0.5}).sampling.logit_bias == ((5, -100.0), (6, 0.5))


@pytest.mark.parametrize(
    "bias",
    [{"60000": 1}, {"abc": 1}, {"-1": 1}, {"1.5": 1}, {"5": 101}, {"5": -100.5}, {"5": True}, {"5": "1"}, {"5": None},
     {"5": math.nan}, {"05": 1}, {" 5": 1}, {"٥": 1}, {"9" * 5000: 1}, [], 5, {str(i): 1 for i in range(1025)}],
)  # fmt: skip
def test_other_logit_biases_are_refused(bias):
    assert refused(completion, logit_bias=bias).param == "logit_bias"


# --- logprobs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sent", "kept"), [(None, -1), (0, 0), (5, 5)])
def test_completions_take_a_number_of_logprobs(sent, kept):
    assert completion(logprobs=sent).sampling.num_logprobs == kept


@pytest.mark.parametrize("value", [6, -1, True, False, 1.0, "5"])
def test_other_logprobs_of_completions_are_refused(value):
    assert refused(completion, logprobs=value).param == "logprobs"


def test_completions_have_no_top_logprobs():
    assert refused(completion, top_logprobs=5).param == "top_logprobs"


@pytest.mark.parametrize(
    ("fields", "kept"),
    [({}, -1), ({"logprobs": False}, -1), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20)],
)
def test_chat_takes_a_switch_and_a_number(fields, kept):
    assert chat(**fields).sampling.num_logprobs == kept


@pytest.mark.parametrize(
    "fields",
    [{"top_logprobs": 5}, {"logprobs": False, "top_logprobs": 5}, {"logprobs": True, "top_logprobs": 21},
     {"logprobs": True, "top_logprobs": 16384}, {"logprobs": True, "top_logprobs": True}],
)  # fmt: skip
def test_other_top_logprobs_of_chat_are_refused(fields):
    assert refused(chat, **fields).param == "top_logprobs"


def test_a_number_is_no_switch():
    assert refused(chat, logprobs=5).param == "logprobs"


# --- stream ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wants"),
    [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True),
     ({"include_usage": None}, False), ({"include_obfuscation": False}, False)],
)  # fmt: skip
def test_usage_of_a_stream_is_asked_for_in_so_many_words(options, wants):
    assert completion(stream=True, stream_options=options).includes_usage is wants


@pytest.mark.parametrize("options", [{}, {"include_usage": True}])
def test_stream_options_without_a_stream_are_refused(options):
    assert refused(completion, stream_options=options).param == "stream_options"


@pytest.mark.parametrize("options", [True, [], "x", {"include_usage": 1}, {"continuous_usage_stats": True}])
def test_other_stream_options_are_refused(options):
    assert refused(completion, stream=True, stream_options=options).status == 400


# --- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "kept"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([5, 6], ((5, 6),)), ([[5], [6, 7]], ((5,), (6, 7))), ([0], ((0,),))],
)
def test_a_prompt_is_text_ids_or_a_list_of_either(sent, kept):
    assert completion(prompt=sent).prompts == kept


@pytest.mark.parametrize(
    "prompt",
    [None, "", [""], [], [[]], ["ok", ""], [[5], []], ["a", [5]], [[5], "a"], ["a", 5], [5, "a"], {}, 5, True, [None],
     [{"a": 1}], ["\ud800"], "\udfff"],
)  # fmt: skip
def test_other_prompts_are_refused(prompt):
    assert refused(completion, prompt=prompt).param == "prompt"


@pytest.mark.parametrize("ids", [[0, 1, 512], [-1], [2**31], [True], [1.5], [1, None], [[0], [512]]])
def test_ids_outside_the_vocabulary_are_refused(ids):
    assert refused(completion, prompt=ids).param == "prompt"


def test_more_prompts_than_the_limit_are_refused():
    assert len(completion(prompt=["a"] * 64).prompts) == 64
    error = refused(completion, prompt=["a"] * 65)
    assert (error.param, error.code) == ("prompt", "invalid_value")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt": ["a"] * 5}, "prompt"), ({"prompt": ["a"] * 2, "n": 3}, "prompt"), ({"n": 5}, "n")],
)
def test_more_choices_than_the_server_ever_queues_are_the_caller_s_fault(fields, param):
    few = dataclasses.replace(MODEL, max_choices=4)
    with pytest.raises(RequestError, match="at most 4") as caught:
        parse("completion", {"model": "tiny", "prompt": "hi", **fields}, few)
    assert (caught.value.param, caught.value.status) == (param, 400)
    assert parse("completion", {"model": "tiny", "prompt": ["a"] * 2, "n": 2}, few).num_choices == 4


def test_a_long_list_of_ids_is_refused_without_looking_at_them():
    error = refused(completion, prompt=[5] * 1_000_000)
    assert error.code == "context_length_exceeded"
    assert "128" in error.message and "1000000" in error.message


def test_indexes_count_prompts_times_samples():
    assert completion(prompt=["a", "b", "c"], n=2).num_choices == 6


# --- messages --------------------------------------------------------------------------------------------------------


def with_message(**fields):
    return chat(messages=[{"role": "user", "content": "hi", **fields}])


@pytest.mark.parametrize("messages", [None, [], {}, "hi", 5, [5], ["hi"], [[]], [None]])
def test_messages_must_be_a_list_with_something_in_it(messages):
    assert refused(chat, messages=messages).status == 400


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_known_roles_are_kept(role):
    assert with_message(role=role).messages[0]["role"] == role


def test_developer_is_system():
    assert with_message(role="developer").messages[0]["role"] == "system"


@pytest.mark.parametrize("role", ["function", "robot", "User", "", None, 1, [], {}, "user<|im_end|>"])
def test_other_roles_are_refused(role):
    assert refused(with_message, role=role).param == "messages[0].role"


def test_text_parts_are_joined_by_newlines():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert with_message(content=parts).messages[0]["content"] == "a\nb"


@pytest.mark.parametrize(
    "content",
    [None, 5, True, {}, [], ["a"], [{"type": "image_url", "image_url": {"url": "x"}}], [{"type": "text"}],
     [{"type": "text", "text": 5}], [{"text": "a"}], "\ud800"],
)  # fmt: skip
def test_other_content_is_refused(content):
    assert refused(with_message, content=content).param.startswith("messages[0].content")


def test_empty_content_is_content():
    assert with_message(content="").messages[0]["content"] == ""


def test_names_are_kept_when_they_are_names():
    message = with_message(role="tool", name="get_weather", tool_call_id="call_1").messages[0]
    assert (message["name"], message["tool_call_id"]) == ("get_weather", "call_1")


@pytest.mark.parametrize("name", ["a b", "<|im_start|>", "", 5, "x" * 129, "a\n"])
@pytest.mark.parametrize("field", ["name", "tool_call_id"])
def test_names_that_are_none_are_refused(field, name):
    assert refused(with_message, **{field: name}).param == f"messages[0].{field}"


@pytest.mark.parametrize("field", ["tool_calls", "function_call", "audio"])
def test_parts_of_messages_that_are_not_served_are_refused(field):
    assert refused(with_message, role="assistant", **{field: [{"id": "x"}]}).param == f"messages[0].{field}"
    assert with_message(**{field: None})


def test_more_messages_than_tokens_fit_are_refused():
    assert refused(chat, messages=USER * 128).code == "context_length_exceeded"


def test_the_error_says_which_message_is_wrong():
    assert refused(chat, messages=[*USER, {"role": "x"}]).param == "messages[1].role"


# --- what is not served ----------------------------------------------------------------------------------------------

UNSUPPORTED = {
    "echo": True, "suffix": "x", "best_of": 2, "tools": [{"type": "function"}], "tool_choice": "required",
    "functions": [{}], "function_call": {"name": "f"}, "response_format": {"type": "json_object"},
    "structured_outputs": {"json": {}}, "guided_json": {}, "guided_regex": "a", "guided_choice": ["a"], "grammar": "x",
    "prompt_logprobs": -1, "chat_template": "{{ 1 }}", "chat_template_kwargs": {"chat_template": "x"}, "audio": {},
    "modalities": ["text", "audio"], "use_beam_search": True, "bad_words": ["a"] * 50_000,
    "allowed_token_ids": [1] * 2000,
    "logits_processors": ["x"], "continue_final_message": True, "add_generation_prompt": False,
    "truncate_prompt_tokens": 5, "include_stop_str_in_output": True, "skip_special_tokens": False,
    "length_penalty": 2.0, "documents": [{}], "web_search_options": {}, "prompt_embeds": "x",
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_field_that_is_not_served_is_refused_by_name(name):
    for call in (completion, chat):
        error = refused(call, **{name: UNSUPPORTED[name]})
        assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")


HARMLESS = {
    "echo": False, "suffix": "", "best_of": 1, "tools": [], "tool_choice": "none", "functions": [],
    "function_call": "none", "response_format": {"type": "text"}, "chat_template_kwargs": {}, "modalities": ["text"],
    "use_beam_search": False, "bad_words": [], "length_penalty": 1.0, "skip_special_tokens": True,
    "add_generation_prompt": True, "continue_final_message": False, "parallel_tool_calls": True, "user": "me",
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_the_value_that_asks_for_nothing_is_accepted(name):
    assert chat(**{name: HARMLESS[name]}) == chat()


@pytest.mark.parametrize(("name", "value"), [("echo", 0), ("echo", 1), ("best_of", True), ("length_penalty", math.nan)])
def test_a_value_that_only_looks_harmless_is_refused(name, value):
    assert refused(completion, **{name: value}).param == name


def test_unknown_fields_are_ignored_and_named():
    assert completion(made_up=1, other={"a": []}, absent=None).ignored == ("made_up", "other")


# --- extensions ------------------------------------------------------------------------------------------------------


def test_extensions_are_kept():
    parsed = completion(include_phases=True, return_token_ids=True, priority=-3, cache_salt="s", ignore_eos=True)
    assert (parsed.includes_phases, parsed.returns_token_ids, parsed.priority, parsed.salt) == (True, True, -3, "s")
    assert parsed.sampling.ignore_eos


@pytest.mark.parametrize("salt", [5, True, [], "x" * 257, "\ud800"])
def test_a_salt_is_a_short_text(salt):
    assert refused(completion, cache_salt=salt).param == "cache_salt"


def test_a_latency_target_is_checked_and_said_to_be_ignored():
    assert completion(slo={"ttft_ms": 200, "tpot_ms": 50}).ignored == ("slo",)


@pytest.mark.parametrize("slo", [5, [], {"ttft": 5}])
def test_latency_targets_are_an_object_of_known_names(slo):
    assert refused(completion, slo=slo).param == "slo"


@pytest.mark.parametrize("slo", [{"ttft_ms": 0}, {"ttft_ms": True}, {"tpot_ms": "5"}])
def test_a_latency_target_that_is_none_is_refused_by_its_name(slo):
    assert refused(completion, slo=slo).param == f"slo.{next(iter(slo))}"


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff\xfe", b"{'a': 1}", b'{"a": 1,}', b"[" * 100_000,
     b'{"a":' * 100_000, b"9" * 8_000_000, '{"a": 1}'.encode("utf-16")],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(raw):
    with pytest.raises(RequestError) as caught:
        parse_object(raw)
    assert caught.value.status == 400


@pytest.mark.parametrize("part", [b"[],", b"{},", b'"%d":1,', b"1," * 10])
def test_a_big_body_of_many_small_parts_is_refused_before_it_is_parsed(part):
    with pytest.raises(RequestError, match="too many parts"):
        parse_object(b"[" + part * 120_000 + b"1]")
