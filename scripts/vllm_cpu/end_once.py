"""Ends a vLLM server as `kill -9` would, in the middle of its requests. Tests name it by `--middleware end_once.EndOnce`.

The server ends at its 20th request for completions, unless the file that DEEPSPEC_END_ONCE names exists. The file is
written first, so that the server that is started next goes on.
"""

import os
import signal


class EndOnce:
    """ASGI middleware that counts requests for completions."""

    def __init__(self, app):
        self.app, self.requests = app, 0

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"] == "/v1/completions":
            self.requests += 1
            mark = os.environ["DEEPSPEC_END_ONCE"]
            if self.requests == 20 and not os.path.exists(mark):
                open(mark, "x").close()
                os.kill(os.getpid(), signal.SIGKILL)
        await self.app(scope, receive, send)
