"""What the API knows of a request beside what HTTP says."""

from typing import Any

from zse.http.exchange import HTTPRequest
from zse.server.keys import OWNER, Access


class APIRequest(HTTPRequest):
    """App.check_head() fills it in. route: of routes.table. parameters: name → value of the path's {name}. tenant: whose
    key the request brought, access: what that key may do; a server without keys asks for none."""

    route: Any = None
    parameters: dict[str, str] = {}
    tenant: str = ""
    access: Access = OWNER
