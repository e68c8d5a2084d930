"""What the API knows of a request beside what HTTP says."""

from typing import Any

from zse.http.exchange import HTTPRequest
from zse.server.keys import Access, Caller


class APIRequest(HTTPRequest):
    """App.check_head() fills it in. route: of routes.table. parameters: name → value of the path's {name}. caller: whose key the
    request brought; a server without keys asks for none."""

    route: Any = None
    parameters: dict[str, str] = {}
    caller: Caller = Caller()

    @property
    def tenant(self) -> str:
        """Who owns what the request leaves."""
        return self.caller.tenant

    @property
    def account(self) -> str:
        """Who is limited and counted."""
        return self.caller.account

    @property
    def access(self) -> Access:
        return self.caller.access
