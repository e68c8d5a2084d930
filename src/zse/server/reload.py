"""What a changed configuration does to a server that runs."""

from collections.abc import Collection
from typing import Any

from zse.http.listener import Server
from zse.log import setup
from zse.server import cross_origin
from zse.server.app import App
from zse.server.auth import HostCheck
from zse.server.pool import ModelPool


def take(options: Any, changed: Collection[str], app: App, pool: ModelPool, server: Server) -> None:
    """Make `options` (ServeOptions) true of what comes from now on: requests, connections, loads. changed: names of its
    fields.; keys are KeyWatch's.

    Answers that run keep what they began with."""
    app.any_model_name = options.any_model_name
    app.tool_parser, app.reasoning_parser = options.tool_parser, options.reasoning_parser
    app.session_ttl_s, app.file_quota = options.session_ttl_s, options.file_quota
    app.adapter_quota = options.adapter_quota
    server.limits = options.limits
    pool.limit(options.spare_engines, options.idle_timeout_s, options.max_loaded)
    if "allowed_hosts" in changed:
        app.replace_hosts(HostCheck(options.allowed_hosts))
    app.cross_origin = cross_origin.CrossOrigin(options.cors_origins) if options.cors_origins else None
    if {"max_queue", "max_queue_tokens", "queue_timeout_s", "max_wait_s"} & {*changed}:
        app.admission.bounds.limit(
            options.max_queue, options.max_queue_tokens, options.queue_timeout_s, options.max_wait_s
        )
    if {"log_level", "log_format"} & {*changed}:
        setup(options.log_level, options.log_format)
        app.logs.attach()
