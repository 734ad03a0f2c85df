"""A reward server that needs only the standard library: exact match of the answer. Start it, then train:

    python examples/reward_server.py 8009
    python rloo.py --rewards examples/remote_reward.py:remote

The request is a JSON object of lists with one entry per response: prompts, responses, references (answers
of the dataset) and images (a list of base64-encoded files each). The reply is {"rewards": [...]}, with a
number per response, or null if the reward does not apply.
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def score(responses: list[str], references: list, **fields) -> list[float | None]:
    """1 if the last <answer>...</answer>, or a response without tags, equals the reference, else 0."""
    rewards = []
    for text, reference in zip(responses, references):
        answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL) or [text]
        is_right = answers[-1].strip().lower() == str(reference).strip().lower()
        rewards.append(None if reference is None else float(is_right))
    return rewards


class Rewards(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # several requests per connection

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            reply = {"rewards": score(**json.loads(body))}
            status = 200
        except Exception as error:  # 400, so that the client does not retry
            reply = {"error": repr(error)}
            status = 400
        reply = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Rewards)
    print(f"rewards at http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
