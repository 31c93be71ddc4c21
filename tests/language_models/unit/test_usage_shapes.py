"""The tokens of answers in the forms in which public engines and APIs state their usage.

Each answer has the keys that the documentation of its API or engine shows, with numbers of ours.
"""

import json
from typing import Any

import pytest

from cavvy.capabilities.language_models.token_usage import (
    GENERATE,
    LLAMA,
    OLLAMA,
    USAGE,
    UsageReader,
)

P, C = "prompt_tokens", "completion_tokens"
I, O, T = "input_tokens", "output_tokens", "total_tokens"  # noqa: E741
PD, CD = "prompt_tokens_details", "completion_tokens_details"
BASE = {P: 90, C: 40, T: 130}
Expected = tuple[int, int, int]  # prompt, cached tokens of it, completion
ALL, PLAIN, ONLY = (90, 80, 40), (90, 0, 40), (90, 0, 0)


def use(**more: Any) -> dict[str, Any]:
    return {"id": "x", "usage": {**BASE, **more}}


def cached(**more: Any) -> dict[str, Any]:
    return use(**{PD: {"cached_tokens": 80, **more}})


CHATS: dict[str, tuple[dict[str, Any], Expected]] = {
    "openai": (
        use(
            **{
                PD: {"cached_tokens": 80, "audio_tokens": 0},
                CD: {
                    **{"reasoning_tokens": 8, "audio_tokens": 0},
                    **{"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
                },
            }
        ),
        ALL,
    ),
    "openai: old": (use(), PLAIN),
    "openai: audio with a third level": (
        use(**{PD: {"cached_tokens": 80, "cached_tokens_details": {"text_tokens": 80}}}),
        ALL,
    ),
    "openai: responses": (
        {
            "usage": {
                **{I: 90, O: 40, T: 130, "input_tokens_details": {"cached_tokens": 80}},
                "output_tokens_details": {"reasoning_tokens": 8},
            }
        },
        ALL,
    ),
    "openai: realtime": (
        {
            "response": {
                "usage": {
                    **{T: 130, I: 90, O: 40},
                    "input_token_details": {
                        **{"text_tokens": 90, "audio_tokens": 0, "cached_tokens": 80},
                        "cached_tokens_details": {"text_tokens": 80, "audio_tokens": 0},
                    },
                    "output_token_details": {"text_tokens": 40, "audio_tokens": 0},
                }
            }
        },
        ALL,
    ),
    "openai: embeddings": ({"usage": {P: 90, T: 90}, "data": [1.5] * 9}, ONLY),
    "openai: images": (
        {
            "usage": {
                **{T: 130, I: 90, O: 40},
                "input_tokens_details": {"text_tokens": 50, "image_tokens": 40},
            }
        },
        PLAIN,
    ),
    "openai: transcriptions": (
        {
            "usage": {
                **{"type": "tokens", I: 90, O: 40, T: 130},
                "input_token_details": {"text_tokens": 0, "audio_tokens": 90},
            }
        },
        PLAIN,
    ),
    "azure openai": ({"prompt_filter_results": [{"usage": None}], **cached()}, ALL),
    "anthropic": (
        {
            "usage": {
                **{I: 6, O: 40},
                **{"cache_creation_input_tokens": 4, "cache_read_input_tokens": 80},
            }
        },
        ALL,
    ),
    "anthropic: times of the cache": (
        {
            "usage": {
                **{I: 6, "cache_creation_input_tokens": 4, "cache_read_input_tokens": 80, O: 40},
                "cache_creation": {
                    **{"ephemeral_5m_input_tokens": 4, "ephemeral_1h_input_tokens": 0},
                },
                **{"service_tier": "standard", "server_tool_use": {"web_search_requests": 1}},
            }
        },
        ALL,
    ),
    "anthropic: iterations": (
        {
            "usage": {
                **{I: 90, O: 40},
                "iterations": [
                    {I: 90, O: 40, "cache_creation": {"ephemeral_5m_input_tokens": 0}},
                ],
            }
        },
        PLAIN,
    ),
    "gemini": (
        {
            "usageMetadata": {
                **{"promptTokenCount": 90, "candidatesTokenCount": 40, "totalTokenCount": 130},
                "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 90}],
            }
        },
        PLAIN,
    ),
    "gemini: thoughts and a cache": (
        {
            "usageMetadata": {
                **{"promptTokenCount": 90, "cachedContentTokenCount": 80, "totalTokenCount": 130},
                **{"candidatesTokenCount": 30, "thoughtsTokenCount": 10},
            }
        },
        ALL,
    ),
    "gemini: results of tools": (
        {
            "usageMetadata": {
                **{"promptTokenCount": 60, "toolUsePromptTokenCount": 30, "totalTokenCount": 130},
                **{"candidatesTokenCount": 30, "thoughtsTokenCount": 10},
                "toolUsePromptTokensDetails": [{"modality": "TEXT", "tokenCount": 30}],
            }
        },
        PLAIN,
    ),
    "gemini: a blocked answer": (
        {"usageMetadata": {"promptTokenCount": 90, "totalTokenCount": 90}},
        ONLY,
    ),
    "gemini: a session": (
        {
            "serverContent": {"turnComplete": True},
            "usageMetadata": {
                **{"promptTokenCount": 90, "responseTokenCount": 40, "totalTokenCount": 130},
                "responseTokensDetails": [{"modality": "AUDIO", "tokenCount": 40}],
            },
        },
        PLAIN,
    ),
    "gemini: python": (
        {
            "usage_metadata": {
                **{"prompt_token_count": 90, "candidates_token_count": 40},
                **{"cached_content_token_count": 80, "total_token_count": 130},
            }
        },
        ALL,
    ),
    "gemini: openai's form": (use(), PLAIN),
    "mistral": (use(prompt_audio_seconds={}), PLAIN),
    "mistral: a cache": (use(num_cached_tokens=80, **{PD: {"cached_tokens": 80}}), ALL),
    "mistral: ocr": (
        {"usage_info": {"pages_processed": 1, "doc_size_bytes": None}, **use()},
        PLAIN,
    ),
    "deepseek": (use(prompt_cache_hit_tokens=80, prompt_cache_miss_tokens=10), ALL),
    "deepseek: reasoner": (
        use(
            prompt_cache_hit_tokens=80,
            prompt_cache_miss_tokens=10,
            **{PD: {"cached_tokens": 80}, CD: {"reasoning_tokens": 30}},
        ),
        ALL,
    ),
    "cohere": (
        {"usage": {"billed_units": {I: 5, O: 40}, "tokens": {I: 90, O: 40}, "cached_tokens": 80}},
        ALL,
    ),
    "cohere: billed only": ({"usage": {"billed_units": {I: 90, O: 40}}}, PLAIN),
    "cohere: floats": ({"usage": {"tokens": {I: 90.0, O: 40.0}}}, PLAIN),
    "groq": (
        use(queue_time=0.01, prompt_time=0.02, completion_time=0.1, total_time=0.12),
        PLAIN,
    ),
    "groq: a stream": ({"choices": [], "x_groq": {"id": "req", **use(queue_time=0.1)}}, PLAIN),
    "groq: a cache": ({**cached(), "usage_breakdown": None, "x_groq": {"id": "r"}}, ALL),
    "xai": (
        {
            "usage": {
                **{P: 90, C: 30, T: 130, "num_sources_used": 0},
                PD: {"text_tokens": 90, "audio_tokens": 0, "image_tokens": 0, "cached_tokens": 80},
                CD: {"reasoning_tokens": 10, "audio_tokens": 0},
            }
        },
        ALL,
    ),
    "together": (use(cached_tokens=80), ALL),
    "moonshot": (use(cached_tokens=80), ALL),
    "fireworks": (cached(), ALL),
    "perplexity": (
        use(
            search_context_size="low",
            citation_tokens=3,
            cost={"input_tokens_cost": 0.1, "output_tokens_cost": 0.2, "total_cost": 0.3},
        ),
        PLAIN,
    ),
    "openrouter": (
        use(
            cost=0.1,
            is_byok=False,
            cost_details={"upstream_inference_cost": None},
            **{PD: {"cached_tokens": 80}, CD: {"reasoning_tokens": 0}},
        ),
        ALL,
    ),
    "cerebras": ({**cached(), "time_info": {"queue_time": 0.1}}, ALL),
    "sambanova": (
        use(time_to_first_token=0.1, total_latency=0.2, stop_reason="stop", is_last_response=True),
        PLAIN,
    ),
    "qwen": (cached(text_tokens=90), ALL),
    "litellm": (use(cache_read_input_tokens=80, cache_creation_input_tokens=0), ALL),
    "bedrock: converse": (
        {
            "usage": {
                **{"inputTokens": 6, "outputTokens": 40, "totalTokens": 130},
                **{"cacheReadInputTokens": 80, "cacheWriteInputTokens": 4},
            },
            "metrics": {"latencyMs": 9},
        },
        ALL,
    ),
    "voyage": ({"usage": {T: 90}}, ONLY),
    "jina": ({"usage": {T: 90, P: 90}}, ONLY),
    "vllm": ({"usage": {P: 90, T: 130, C: 40, PD: None}}, PLAIN),
    "vllm: cached tokens": ({"usage": {P: 90, T: 130, C: 40, PD: {"cached_tokens": 80}}}, ALL),
    "vllm: rerank": ({"usage": {P: 90, T: 90}, "results": []}, ONLY),
    "vllm: responses": (
        {
            "usage": {
                **{I: 90, O: 40, T: 130},
                "input_tokens_details": {
                    **{"cached_tokens": 80, "input_tokens_per_turn": [90]},
                    "cached_tokens_per_turn": [80],
                },
                "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
            }
        },
        ALL,
    ),
    "sglang": (use(reasoning_tokens=0, **{PD: {"cached_tokens": 80}}), ALL),
    "llama.cpp": (
        {**cached(), "timings": {"cache_n": 80, "prompt_n": 10, "predicted_n": 40}},
        ALL,
    ),
    "tgi": (use(), PLAIN),
    "tensorrt-llm": (cached(), ALL),
    "ollama: openai's form": (use(), PLAIN),
    "a total instead of a completion": ({"usage": {P: 90, T: 130}}, PLAIN),
    "five levels": (use(a={"b": [{"c": {"d": {P: 1}}}]}), PLAIN),
}
OWN: dict[str, tuple[bytes, dict[str, Any], Expected]] = {
    "llama.cpp": (
        LLAMA,
        {"content": "x", "tokens_predicted": 40, "tokens_evaluated": 90, "timings": {"a": 1}},
        PLAIN,
    ),
    "tgi: details": (
        GENERATE,
        {"generated_text": "x", "details": {"generated_tokens": 40, "input_length": 90}},
        PLAIN,
    ),
    "sglang: generate": (
        GENERATE,
        {"text": "x", "meta_info": {P: 90, C: 40, "cached_tokens": 80, "e2e_latency": 0.1}},
        ALL,
    ),
    "ollama": (
        OLLAMA,
        {"done": True, "prompt_eval_count": 90, "prompt_eval_duration": 9, "eval_count": 40},
        PLAIN,
    ),
}
UNKNOWN: dict[str, dict[str, Any]] = {
    "seconds of audio": {"usage": {"type": "duration", "seconds": 9}},
    "units of a search": {"usage": {"billed_units": {"search_units": 1}}},
    "characters": {"usage": {"characters": 90}},
    "texts": {"usage": {P: "90", C: "40"}},
    "none": {"usage": None},
    "empty": {"usage": {}},
    "a list": {"usage": [90, 40]},
}


def read(name: bytes, answer: dict[str, Any], indent: int | None) -> UsageReader:
    reader = UsageReader(name)
    body = json.dumps(answer, indent=indent).encode()
    for at in range(0, len(body), 7):
        reader.feed(body[at : at + 7])
    return reader


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("shape", CHATS)
def test_usage_is_read_in_each_public_form(shape: str, indent: int | None) -> None:
    answer, expected = CHATS[shape]
    found = read(USAGE, answer, indent).use
    assert found is not None
    assert (found.prompt, found.cached, found.completion) == expected


@pytest.mark.parametrize("shape", OWN)
def test_usage_is_read_on_the_own_routes_of_engines(shape: str) -> None:
    name, answer, expected = OWN[shape]
    found = read(name, answer, None).use
    assert found is not None
    assert (found.prompt, found.cached, found.completion) == expected


@pytest.mark.parametrize("shape", UNKNOWN)
def test_unknown_usage_states_nothing(shape: str) -> None:
    assert read(USAGE, UNKNOWN[shape], None).use is None
