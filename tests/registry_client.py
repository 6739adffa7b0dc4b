"""A registry's client that hides nothing: every answer with its status, headers and bytes."""

import http.client
import json
from typing import Any, NamedTuple

TOPOLOGY = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"


class Answer(NamedTuple):
    status: int
    media_type: str
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def value(self) -> Any:
        """The JSON value, or the text where it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return self.body.decode()


def send(
    address: str, method: str, path: str, body: str | None = None, headers: dict[str, str] | None = None
) -> Answer:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        data = None if body is None else body.encode()
        connection.request(method, path, body=data, headers=headers or {})
        answer = connection.getresponse()
        body_read = answer.read()
    finally:
        connection.close()
    media_type = (answer.getheader("Content-Type") or "").partition(";")[0]
    return Answer(answer.status, media_type, answer.headers, body_read)


def registration(tp_size: int = 1, tp_rank: int = 0, **changes: object) -> str:
    """The body of one rank's PUT, era E4, in an engine of tp_size ranks."""
    body: dict[str, object] = {
        "attn_tp_size": tp_size, "attn_tp_rank": tp_rank, "attn_cp_size": 1, "attn_cp_rank": 0,
        "attn_dp_size": 1, "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0,
        "system_dp_size": 1, "system_dp_rank": 0, "rank_ip": "10.0.0.1", "rank_port": 2000 + tp_rank,
        "page_size": 64, "kv_cache_dtype": "auto",
    }  # fmt: skip
    return json.dumps(body | changes)


def rank_path(tp_rank: int) -> str:
    return f"/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank={tp_rank}&target_pp_rank=0"


def register(address: str, tp_size: int = 1, **changes: object) -> None:
    """Register a whole engine."""
    for tp_rank in range(tp_size):
        answer = send(address, "PUT", "/route", registration(tp_size, tp_rank, **changes))
        assert (answer.status, answer.body) == (200, b"OK")
