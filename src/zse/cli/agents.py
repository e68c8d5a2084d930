"""The settings by which coding agents and chat front ends find a server, as their documentation has them (November
2026)."""

import json
import shlex
from collections import namedtuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Endpoint(namedtuple("Endpoint", "url model key context", defaults=(None,))):
    """What they are to find. url: without /v1. key: a text also where the server asks for none, since most clients do.
    context: tokens, where the server says."""

    __slots__ = ()

    @property
    def base(self) -> str:
        return f"{self.url}/v1"


class AgentSettings(namedtuple("AgentSettings", "env path value panel start", defaults=({}, "", None, {}, ""))):
    """Of one of them. env: variables. path: of its file, ~ for the home, else beneath the folder that it is started in;
    value: what stands there, a dict whose form the path's ending says. panel: what is typed into its settings. start:
    its command line."""

    __slots__ = ()

    def text(self) -> str:
        """The file's contents."""
        ending = self.path.rpartition(".")[2]
        return {"json": _json, "toml": _toml, "yaml": _yaml, "yml": _yaml}[ending](self.value)


class Agent(namedtuple("Agent", "title docs settings")):
    """docs: where its settings are documented; settings: Endpoint → AgentSettings."""

    __slots__ = ()


def exports(env: dict[str, str]) -> str:
    """Lines for a shell."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())


def _json(value: dict) -> str:
    return json.dumps(value, indent=2) + "\n"


def _toml(value: dict, prefix: str = "") -> str:
    """Strings, numbers, truths and tables of them: TOML writes those of JSON's form the same."""
    lines = [f"{key} = {json.dumps(item)}\n" for key, item in value.items() if not isinstance(item, dict)]
    for key, item in value.items():
        if isinstance(item, dict):
            inner = _toml(item, f"{prefix}{key}.")
            has_values = any(not isinstance(each, dict) for each in item.values())
            lines.append(f"\n[{prefix}{key}]\n{inner}" if has_values else inner)
    return "".join(lines)


def _yaml(value: "Any", indent: int = 0) -> str:
    """Objects as blocks; lists and texts as JSON has them, which YAML reads."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        items = (_yaml(item, indent + 2).lstrip(" ") for item in value)
        return "".join(f"{' ' * indent}- {item}" for item in items)
    out = ""
    for key, item in value.items():
        is_block = isinstance(item, dict) or isinstance(item, list) and item and isinstance(item[0], dict)
        out += f"{' ' * indent}{key}:" + (f"\n{_yaml(item, indent + 2)}" if is_block else f" {json.dumps(item)}\n")
    return out


def _claude(to: Endpoint) -> AgentSettings:
    tiers = {f"ANTHROPIC_DEFAULT_{tier}_MODEL": to.model for tier in ("OPUS", "SONNET", "HAIKU")}
    env = {"ANTHROPIC_BASE_URL": to.url, "ANTHROPIC_AUTH_TOKEN": to.key, "ANTHROPIC_MODEL": to.model} | tiers
    return AgentSettings(env, "~/.claude/settings.json", {"env": env}, start="claude")


def _codex(to: Endpoint) -> AgentSettings:
    provider = {"name": "ZSE", "base_url": to.base, "wire_api": "responses", "env_key": "ZSE_CLIENT_KEY"}
    value = {"model": to.model, "model_provider": "zse"} | (
        {} if to.context is None else {"model_context_window": to.context}
    )
    env = {"ZSE_CLIENT_KEY": to.key}
    # A profile, which leaves the user's own configuration as it is.
    return AgentSettings(
        env, "~/.codex/zse.config.toml", value | {"model_providers": {"zse": provider}}, start="codex --profile zse"
    )


def _opencode(to: Endpoint) -> AgentSettings:
    limit = {} if to.context is None else {"limit": {"context": to.context, "output": to.context}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "ZSE",
        "options": {"baseURL": to.base, "apiKey": "{env:ZSE_CLIENT_KEY}"},
        "models": {to.model: {"name": to.model} | limit},
    }
    value = {"$schema": "https://opencode.ai/config.json", "model": f"zse/{to.model}", "provider": {"zse": provider}}
    return AgentSettings({"ZSE_CLIENT_KEY": to.key}, "~/.config/opencode/opencode.json", value, start="opencode")


def _aider(to: Endpoint) -> AgentSettings:
    env = {"OPENAI_API_BASE": to.base, "OPENAI_API_KEY": to.key}
    value = {"model": f"openai/{to.model}", "openai-api-base": to.base, "openai-api-key": to.key}
    return AgentSettings(env, ".aider.conf.yml", value, start=f"aider --model {shlex.quote(f'openai/{to.model}')}")


def _continue(to: Endpoint) -> AgentSettings:
    model = {"name": to.model, "provider": "openai", "model": to.model, "apiBase": to.base, "apiKey": to.key}
    model |= {"roles": ["chat", "edit", "apply"]}
    return AgentSettings(
        path="~/.continue/config.yaml", value={"name": "ZSE", "version": "0.0.1", "schema": "v1", "models": [model]}
    )


def _cline(to: Endpoint) -> AgentSettings:
    panel = {"API Provider": "OpenAI Compatible", "Base URL": to.base, "API Key": to.key, "Model ID": to.model}
    return AgentSettings(panel=panel)


def _open_webui(to: Endpoint) -> AgentSettings:
    return AgentSettings({"OPENAI_API_BASE_URL": to.base, "OPENAI_API_KEY": to.key}, start="open-webui serve")


def _librechat(to: Endpoint) -> AgentSettings:
    endpoint = {
        "name": "ZSE",
        "apiKey": "${ZSE_CLIENT_KEY}",
        "baseURL": to.base,
        "models": {"default": [to.model], "fetch": True},
        "titleConvo": True,
        "titleModel": "current_model",
    }
    value = {"version": "1.2.1", "cache": True, "endpoints": {"custom": [endpoint]}}
    return AgentSettings({"ZSE_CLIENT_KEY": to.key}, "librechat.yaml", value)


def _qwen_code(to: Endpoint) -> AgentSettings:
    return AgentSettings({"OPENAI_BASE_URL": to.base, "OPENAI_API_KEY": to.key, "OPENAI_MODEL": to.model}, start="qwen")


def _sdk(to: Endpoint) -> AgentSettings:
    return AgentSettings({"OPENAI_BASE_URL": to.base, "OPENAI_API_KEY": to.key})


def _ollama(to: Endpoint) -> AgentSettings:
    return AgentSettings({"OLLAMA_HOST": to.url}, start=f"ollama run {shlex.quote(to.model)}")


AGENTS = {
    "claude": Agent("Claude Code", "https://code.claude.com/docs/en/settings", _claude),
    "codex": Agent("Codex", "https://developers.openai.com/codex/config-reference", _codex),
    "opencode": Agent("OpenCode", "https://opencode.ai/docs/providers", _opencode),
    "aider": Agent("Aider", "https://aider.chat/docs/llms/openai-compat.html", _aider),
    "continue": Agent("Continue", "https://docs.continue.dev/customize/model-providers/top-level/openai", _continue),
    "cline": Agent("Cline", "https://docs.cline.bot/provider-config/openai-compatible", _cline),
    "qwen-code": Agent("Qwen Code", "https://qwenlm.github.io/qwen-code-docs/en/cli/openai-auth", _qwen_code),
    "open-webui": Agent("Open WebUI", "https://docs.openwebui.com/features/openai", _open_webui),
    "librechat": Agent("LibreChat", "https://www.librechat.ai/docs/quick_start/custom_endpoints", _librechat),
    "openai": Agent("OpenAI's clients", "https://github.com/openai/openai-python", _sdk),
    "ollama": Agent("Ollama's clients", "https://github.com/ollama/ollama-python", _ollama),
}
