"""The judge of judge_reward.py behind HTTP:

    JUDGE=runs/NAME/checkpoint-best python examples/judge_server.py 8008

POST a JSON list of {"prompt", "images": [base64 of the file], "answer_0", "answer_1"}; the reply is a list
with the probability that answer_0 is better, one per pair. Status 400 with {"error": ...} where that fails.
"""

import base64
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from judge_reward import judge_pairs


class Judge(BaseHTTPRequestHandler):
    def do_POST(self):
        try:
            pairs = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for pair in pairs:
                pair["images"] = [base64.b64decode(image) for image in pair["images"]]
            status, reply = 200, judge_pairs(pairs)
        except Exception as error:
            status, reply = 400, {"error": repr(error)}
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Judge)
    print(f"judge on port {server.server_port}", flush=True)
    server.serve_forever()
