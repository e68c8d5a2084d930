"""What the API knows of a request beside what HTTP says."""

from typing import Any

from zse.http.exchange import HTTPRequest
from zse.server.keys import OWNER, Access


class APIRequest(HTTPRequest):
    """App.check_head() fills it in. route: of routes.table. parameters: name → value of the path's {name}. The others
    are of the keys.Caller whose key the request brought; a server without keys asks for none. run: what it holds and
    took, where traces are made and of lines of batches. adapter: of MODEL:ADAPTER, the name; "": none. identity: of the key whose batch it is a line of;
    "": a client waits for its answer. num_events: of a stream whose events are numbered, so far; None: they are not."""

    route: Any = None
    parameters: dict[str, str] = {}
    tenant: str = ""
    access: Access = OWNER
    account: str = ""
    key_id: int = 0
    adapter: str = ""
    run: Any = None
    identity: str = ""
    num_events: int | None = None
