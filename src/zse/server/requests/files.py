"""What the routes of files accept."""

from zse.sampling.fields import Field, Fields, Integer, Object, OneOf
from zse.server.requests.queries import PAGE
from zse.server.uploads import FILE

BATCH, OUTPUT = "batch", "batch_output"  # OUTPUT: of files that the server makes
PURPOSES = (BATCH, "user_data", "assistants", "vision")
MAX_BYTES = 512 << 20
MAX_BATCH_BYTES = 200 << 20  # of a file of the purpose batch

EXPIRES_AFTER = Object(
    {"anchor": Field(OneOf(("created_at",)), required=True), "seconds": Field(Integer(3600, 30 * 86400), required=True)}
)
UPLOAD: Fields = {
    "file": Field(
        FILE, f"The content, up to {MAX_BYTES >> 20} MiB, {MAX_BATCH_BYTES >> 20} of a batch's.", required=True
    ),
    "purpose": Field(
        OneOf(PURPOSES),
        "What it is for: batch, or user_data, assistants or vision, which are kept; any of them may be an image of a request.",
        required=True,
    ),
    "expires_after": Field(
        EXPIRES_AFTER, 'When it is deleted: {"anchor": "created_at", "seconds": from an hour to 30 days}.'
    ),
}
LIST: Fields = PAGE | {
    "limit": Field(Integer(1, 10_000), "Most that are listed.", 10_000),
    "purpose": Field(OneOf((*PURPOSES, OUTPUT)), "Only those for it."),
}
