"""The judge of judge_reward.py as an HTTP server:

    JUDGE=runs/NAME/checkpoint-500 python examples/judge_server.py 8008

The body of a POST request is a JSON list of {"prompt", "images", "answer_1", "answer_2"}, where images are
base64-encoded files. The reply is a list with the probability that answer_1 is better, one per pair. If
judging fails, the status is 400 and the reply is {"error": ...}.
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
            reply = judge_pairs(pairs)
            status = 200
        except Exception as error:
            reply = {"error": repr(error)}
            status = 400
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Judge)
    print(f"judge on port {server.server_port}", flush=True)
    server.serve_forever()
