"""What the API knows of a request beside what HTTP says."""

from typing import TYPE_CHECKING, Any

from zse.http.exchange import HTTPRequest

if TYPE_CHECKING:
    from zse.server.keys import Access


class APIRequest(HTTPRequest):
    """App.check_head() fills it in. route: of routes.table. parameters: name → value of the path's {name}. tenant: whose
    key the request brought, access: what that key may do."""

    route: Any = None
    parameters: dict[str, str] = {}
    tenant = ""
    access: "Access"
