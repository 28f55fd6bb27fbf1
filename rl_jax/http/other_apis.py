"""Bodies of interfaces that are not OpenAI's: SGLang's /generate, vLLM's /inference/v1/generate, JetStream's.

Must not: wait, or know HTTP.
"""

from collections.abc import Iterator
from typing import Any

from rl_jax.http.completion import Delta, End, Scored
from rl_jax.http.replies import Json, Reply


class SglangReply(Reply):
    """{"text", "output_ids", "meta_info"}; of several prompts or choices a list of them. A stream's chunks hold all
    that was said so far, as SGLang's do."""

    def body(self) -> Any:
        out = [self._so_far(i) for i in range(len(self.choices))]
        return out[0] if len(out) == 1 else out

    def add(self, event: Delta | End | Scored) -> Iterator[Json]:
        for _ in super().add(event):
            pass
        if isinstance(event, Scored):
            return
        several = {"index": event.choice} if len(self.choices) > 1 else {}
        yield {**self._so_far(event.choice), **several}

    def last_chunks(self) -> Iterator[Json]:
        return iter(())

    def _so_far(self, i: int) -> Json:
        choice, ask = self.choices[i], self.ask
        prompt = ask.prompts[i // ask.n]
        meta: Json = {
            "id": ask.id if len(self.choices) == 1 else f"{ask.id}_{i}",
            "finish_reason": None,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(choice.tokens),
            "cached_tokens": 0,
            "weight_version": None,
        }
        if (end := choice.end) is not None:
            finish: Json = {"type": end.finish}
            if end.finish == "length":
                finish["length"] = end.num_tokens
            elif end.finish == "stop":
                matched = end.stop_reason
                last = choice.tokens[-1] if choice.tokens else None
                finish["matched"] = last if matched is None else matched
            meta["finish_reason"] = finish
            meta["cached_tokens"] = end.cached_tokens
            meta["weight_version"] = str(end.spans[-1][2]) if end.spans else None
        if self.options.get("logprobs"):
            text = self._token if self.options.get("text_in_logprobs") else lambda token: None
            rows = [[v, t, text(t)] for t, v in zip(choice.tokens, choice.logprobs)]
            meta["output_token_logprobs"] = rows
            if self.options.get("top"):
                best = choice.likely
                meta["output_top_logprobs"] = [[[v, t, text(t)] for t, v in one] for one in best]
        return {
            "text": "".join(choice.content),
            "output_ids": list(choice.tokens),
            "meta_info": meta,
        }


class TokensReply(Reply):
    """{"request_id", "choices": [{"index", "token_ids", "logprobs", "finish_reason"}]}"""

    def body(self) -> Json:
        choices = []
        for i, choice in enumerate(self.choices):
            logprobs = None
            if self.options.get("logprobs"):
                named = lambda t, v: {"token": f"token_id:{t}", "logprob": v}
                rows = zip(choice.tokens, choice.logprobs, choice.likely)
                told = [
                    {**named(t, v), "top_logprobs": [named(*pair) for pair in best]}
                    for t, v, best in rows
                ]
                logprobs = {"content": told}
            finish = self._finish(choice)
            choices.append({"index": i, "token_ids": choice.tokens, "logprobs": logprobs, **finish})
        prompt = {}
        if self.options.get("prompt_top") is not None:
            prompt["prompt_logprobs"] = self.prompt_logprobs(0)
        return {
            "request_id": self.ask.id,
            "choices": choices,
            **prompt,
            "usage": self.usage(),
            "metadata": self._metadata(self.choices),
        }


class JetstreamReply(Reply):
    """Chunks {"stream_content": {"samples": [{"text", "token_ids"}]}}"""

    def add(self, event: Delta | End | Scored) -> Iterator[Json]:
        for chunk in super().add(event):
            text = chunk["choices"][0]["text"]
            tokens = list(event.tokens) if isinstance(event, Delta) else []
            if text or tokens:
                yield {"stream_content": {"samples": [{"text": text, "token_ids": tokens}]}}
