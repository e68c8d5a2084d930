"""HTTP/1.1 over asyncio: what a peer can make this process read, hold, wait for or write is bounded. No TLS, no HTTP/2.

Nothing here knows models or the API. An `Application` (listener.py) decides what requests mean and writes the bodies of
errors; a request that the protocol itself refuses reaches it as an `HTTPError` (exchange.py). From the socket inwards:

    bind.py        opens the listening socket, before anything heavy is imported
    listener.py    Server: accepts connections, holds the Limits, checks all deadlines with one timer; Connection: one client;
                   runs one request at a time, writes answers, notices when the client leaves
    reader.py      RequestReader: bytes to Requests (httptools parses), with bounds on heads and bodies
    body.py        BodyStream: a body that its handler reads while it arrives, where the application asks for one
    multipart.py   FormReader: forms with files, part by part out of such a body
    exchange.py    HTTPRequest and its strict JSON, Response, HTTPError

Life of a request: Connection.data_received → RequestReader.feed → Application.check_head (the body is not read yet) →
Application.handle (with `request.upload`: before the body is read) → a Response, or events that the handler sends itself → Application.finished.
"""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
