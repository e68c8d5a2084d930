"""What the routes of batches accept."""

from zse.sampling.fields import Field, Fields, OneOf, String
from zse.server.requests.completions import METADATA
from zse.server.requests.files import EXPIRES_AFTER

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
CREATE: Fields = {
    "input_file_id": Field(
        String(256, empty=False), "A file of the purpose batch: a line for each request, up to 50,000.", required=True
    ),
    "endpoint": Field(OneOf(ENDPOINTS), f"The route of all lines: {', '.join(ENDPOINTS)}.", required=True),
    "completion_window": Field(OneOf(("24h",)), "24h; what is not done by then is not run.", required=True),
    "metadata": Field(METADATA.kind, "Up to 16 strings, which it shows."),
    "output_expires_after": Field(
        EXPIRES_AFTER, "When its output and error files are deleted, as expires_after of files."
    ),
}
