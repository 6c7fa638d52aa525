"""Stands in for vLLM in jobs of tests: answers that depend on nothing but the request, so that runs can be compared bit for bit.

Called as vLLM is (``-m vllm.entrypoints.cli.main serve MODEL --host … --port … --served-model-name …``). ``FAKE_VLLM=never``: never
healthy. ``FAKE_DELAY``: seconds an answer takes. ``FAKE_REAL=ROLE:INTERPRETER``: a model folder of this name gets the real one.
"""

import hashlib
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

args = sys.argv[1:]
model = Path(args[3])
real = os.environ.get("FAKE_REAL", "").partition(":")
if real[0] and model.name == real[0]:
    os.execv(real[2], [real[2], *args])
if os.environ.get("FAKE_VLLM") == model.name + "-never":
    time.sleep(3600)

names = args[args.index("--served-model-name") + 1 :]
limit = int(args[args.index("--max-model-len") + 1])
VERDICT = json.dumps({"reasoning": "", "verdict": "OK", "criterion": "", "quote": ""})


def tokens(prompt, seed, n):
    """Ids of plain characters of the byte-level tokenizer."""
    digest = hashlib.sha256(json.dumps([prompt, seed]).encode()).digest()
    return [40 + b % 80 for b in (digest * (1 + n // 32))[:n]]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, data):
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({"data": [{"id": n, "max_model_len": limit} for n in names]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(float(os.environ.get("FAKE_DELAY", "0")))
        if self.path == "/v1/chat/completions":
            message = {"role": "assistant", "content": VERDICT}
            choices = [
                {"index": i, "message": message, "finish_reason": "stop"} for i in range(body.get("n", 1))
            ]
        else:
            choices = []
            for i in range(body["n"]):
                ids = tokens(body["prompt"], body["seed"] + i, body["max_tokens"])
                logprobs = {"token_logprobs": [-1.0] * len(ids)}
                choices.append(
                    {"index": i, "token_ids": ids, "logprobs": logprobs, "finish_reason": "length"}
                )
        self.answer({"choices": choices, "usage": {"prompt_tokens": 1, "completion_tokens": 1}})

    def log_message(self, *a):
        pass


class Server(ThreadingHTTPServer):
    allow_reuse_address = False
    request_queue_size = 128


try:
    server = Server((args[args.index("--host") + 1], int(args[args.index("--port") + 1])), Handler)
except OSError as e:
    sys.exit(f"OSError: {e.strerror}")
server.serve_forever()
