"""Stands in for ``vllm serve`` in tests of the launcher: /health and /v1/models, and the ways in which a server fails."""

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

args = sys.argv[1:]
port = int(args[args.index("--port") + 1])
names = args[args.index("--served-model-name") + 1 :]
mode = os.environ.get("FAKE_VLLM", "good")

if mode == "dies":
    sys.exit("CUDA out of memory, or so")
if mode == "never":
    time.sleep(600)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", os.environ.get("FAKE_TAG", "")])


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": n} for n in names]}).encode() if self.path == "/v1/models" else b""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *a):
        pass


try:
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
except OSError as e:
    sys.exit(f"OSError: {e.strerror}")
server.serve_forever()
