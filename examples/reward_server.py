"""A reward server, standard library only: exact match of the answer. Start it, then train:

    python examples/reward_server.py 8009
    python rloo.py --rewards examples/remote_reward.py:remote --reward-weights 1

The request is a JSON object of lists with one entry per response: prompts, responses, references (answers
of the dataset) and images (a list of base64 picture files for each). The reply is {"rewards": [...]}, a
number or null (does not apply) per response.
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def score(responses: list[str], references: list, **other) -> list[float | None]:
    """1 where the last <answer>...</answer>, or without one the whole response, is the reference, else 0."""
    tagged = [re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL) for text in responses]
    said = [(found or [text])[-1].strip().lower() for found, text in zip(tagged, responses)]
    pairs = zip(said, references)
    return [None if right is None else float(text == str(right).strip().lower()) for text, right in pairs]


class Rewards(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # several requests through one connection

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            status, reply = 200, {"rewards": score(**json.loads(body))}
        except Exception as error:  # a bad request stays bad: 400, so that it is not sent again
            status, reply = 400, {"error": repr(error)}
        reply = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Rewards)
    print(f"rewards at http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
