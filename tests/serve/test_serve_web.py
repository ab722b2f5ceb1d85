"""What browsers and https need: origins that may call the server, and its certificate."""

from __future__ import annotations

import re
import ssl

import httpx
import openai
import pytest
import trustme
from engine_helpers import shared_engine
from server_helpers import MODEL, running

from specjax.cli.flags import ServerSettings
from specjax.cli.serve import main
from specjax.serve.server import check_certificate

CHAT = "/v1/chat/completions"
ASKED = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


@pytest.mark.parametrize(("allowed", "origin"), [(("https://my.site",), "https://my.site"), (("*",), "http://any")])
def test_a_page_of_an_allowed_origin(allowed, origin):
    """It is told so before it has a key, and reads the server's own headers."""
    settings = ServerSettings(api_key=("key",), allowed_origins=allowed)
    with running(shared_engine("NGRAM"), settings) as server, server.client() as client:
        asked = client.options(CHAT, headers={"Origin": origin, **ASKED})
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] in (origin, "*")
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        headers = {"Origin": origin, "Authorization": "Bearer key"}
        answer = client.get("/v1/models", headers=headers)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] in (origin, "*")
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        refused = client.get("/v1/models", headers={"Origin": origin})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] in (origin, "*")


@pytest.mark.parametrize("allowed", [(), ("https://my.site",)])
def test_a_page_of_another_origin(allowed):
    with running(shared_engine("NGRAM"), ServerSettings(allowed_origins=allowed)) as server, server.client() as client:
        asked = client.options(CHAT, headers={"Origin": "https://other.site", **ASKED})
        assert asked.status_code >= 400 and "access-control-allow-origin" not in asked.headers
        answer = client.get("/v1/models", headers={"Origin": "https://other.site"})
        assert "access-control-allow-origin" not in answer.headers


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("certificates"), trustme.CA()
    made = found.issue_cert("127.0.0.1")
    made.private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
    made.cert_chain_pems[0].write_to_path(folder / "server.pem")
    made.private_key_pem.write_to_path(folder / "server.key")
    trustme.CA().issue_cert("127.0.0.1").private_key_pem.write_to_path(folder / "other.key")
    return found, folder


@pytest.mark.parametrize("files", [("both.pem", None), ("server.pem", "server.key")])
def test_https(authority, files):
    found, folder = authority
    certificate, key = (None if name is None else str(folder / name) for name in files)
    trusting = ssl.create_default_context()
    found.configure_trust(trusting)
    settings = ServerSettings(ssl_certfile=certificate, ssl_keyfile=key)
    check_certificate(settings)
    with running(shared_engine("NGRAM"), settings) as server:
        assert server.base.startswith("https://127.0.0.1:")
        with (
            httpx.Client(verify=trusting) as http,
            openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", http_client=http) as client,
        ):
            stream = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=9, stream=True
            )
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{server.base}/health")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.base.replace('https', 'http')}/health")


@pytest.mark.parametrize(
    ("certificate", "key", "said"),
    [
        ("absent.pem", None, "absent.pem"),
        ("server.pem", None, "server.pem: .*; in PEM form there must be a certificate and, there or in --ssl-keyfile,"),
        ("server.pem", "other.key", "other.key: .*KEY_VALUES_MISMATCH[^;]*$"),
        (None, "server.key", "needs --ssl-certfile"),
    ],
)
def test_a_certificate_that_cannot_be_used(authority, certificate, key, said, capsys):
    """Is refused before anything is loaded."""
    _, folder = authority
    names = {"--ssl-certfile": certificate, "--ssl-keyfile": key}
    given = {flag: str(folder / name) for flag, name in names.items() if name is not None}
    fields = {flag[2:].replace("-", "_"): value for flag, value in given.items()}
    with pytest.raises(ValueError, match=said):
        check_certificate(ServerSettings(**fields))
    argv = [part for pair in given.items() for part in pair]
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert re.search(said, printed.err, re.MULTILINE) and not printed.out
    assert main(["--dry-run", *argv]) == 2
    assert capsys.readouterr() == printed
