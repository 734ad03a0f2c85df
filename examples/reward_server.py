"""A reward server for rloo.py and ppo_vl.py, standard library only: exact match of the answer. Start it, then train:

    python examples/reward_server.py 8009
    python rloo.py --rewards http://localhost:8009 --reward-weights 1

The request is a JSON object of lists with one entry per response, at most 64: prompts, queries (prompt + response), responses,
references (answers of the dataset), labels (or null) and images (a list of base64 picture files for each). The reply is an
object: "rewards", one number or null (does not apply) per response, and if you like "components", {name: such a list}, which
appear in the metrics as reward/<server>_<name> and do not count. Requests that fail with status 429 or 5xx come again.
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def score(responses: list[str], references: list, **other) -> dict:
    """1 where the text in the last <answer> tags, or without tags the whole response, equals the reference, else 0."""
    tagged = [re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL) for text in responses]
    said = [found[-1] if found else text for found, text in zip(tagged, responses)]
    rewards = [
        None if reference is None else float(text.strip().lower() == str(reference).strip().lower())
        for text, reference in zip(said, references)
    ]
    return {"rewards": rewards, "components": {"tagged": [float(bool(found)) for found in tagged]}}


class Rewards(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # several requests through one connection

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            status, reply = 200, score(**json.loads(body))
        except Exception as error:  # a bad request stays bad: 400, so that it is not sent again
            status, reply = 400, {"error": repr(error)}
        reply = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Rewards)
    print(f"rewards at http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
