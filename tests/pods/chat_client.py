"""Chats from inside a pod, and tells how each ended. Standard library only: it is given to `python3 -c` there.

    python3 -c ... URL MODEL STREAMS SECONDS TOKENS

STREAMS threads ask again and again until SECONDS have passed; 0 of them: one request each. Writes one line of JSON for
each request: {"at_s": start, "took_s": ..., "tokens": n, "end": "done" | "error: ..." | "refused: ..." | "cut: ..."}.
`done`: the stream ended with [DONE]. `error`: it ended with an error event. `refused`: there was no stream; `cut`: it
broke off.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
import urllib.error
import urllib.request

# The field of a server-sent event that has its content.
DATA = b"data: "


def chat(url: str, model: str, tokens: int) -> tuple[int, str]:
    """How many chunks with text came, and how it ended."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Count from one to a hundred, in words."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    received = 0
    try:
        answer = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as refused:
        return 0, f"refused: {refused.code} {refused.read(200).decode(errors='replace')}"
    except (OSError, http.client.HTTPException) as refused:
        return 0, f"refused: {refused}"
    try:
        with answer:
            for line in answer:
                if not line.startswith(DATA):
                    continue
                content = line[len(DATA) :].strip()
                if content == b"[DONE]":
                    return received, "done"
                event = json.loads(content)
                if "error" in event:
                    return received, f"error: {event['error'].get('code')}"
                received += any(choice["delta"].get("content") for choice in event["choices"])
    except (OSError, http.client.HTTPException) as broken:
        return received, f"cut: {broken!r}"
    return received, "cut: no ending"


def ask(url: str, model: str, tokens: int, until_s: float, began_s: float) -> None:
    while True:
        started_s = time.monotonic()
        received, end = chat(url, model, tokens)
        took_s = time.monotonic() - started_s
        record = {"at_s": round(started_s - began_s, 2), "took_s": round(took_s, 2), "tokens": received, "end": end}
        # In one piece: others write as well.
        sys.stdout.write(json.dumps(record) + "\n")
        sys.stdout.flush()
        if time.monotonic() >= until_s:
            return
        if end.startswith("refused"):
            time.sleep(0.2)


def main() -> None:
    url, model, *numbers = sys.argv[1:]
    streams, seconds, tokens = map(int, numbers)
    began_s = time.monotonic()
    threads = [
        threading.Thread(target=ask, args=(url, model, tokens, began_s + seconds, began_s))
        for _ in range(max(1, streams))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
