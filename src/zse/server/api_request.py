"""What the API knows of a request beside what HTTP says."""

from typing import Any

from zse.http.exchange import HTTPRequest
from zse.server.keys import OWNER, Access


class APIRequest(HTTPRequest):
    """App.check_head() fills it in. route: of routes.table. parameters: name → value of the path's {name}. The others
    are of the keys.Caller whose key the request brought; a server without keys asks for none. run: what it holds and
    took, where traces are made. adapter: of MODEL:ADAPTER, the name; "": none."""

    route: Any = None
    parameters: dict[str, str] = {}
    tenant: str = ""
    access: Access = OWNER
    account: str = ""
    key_id: int = 0
    adapter: str = ""
    run: Any = None
