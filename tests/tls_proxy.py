"""TLS with a private authority, and a user name and password asked for, in front of a server that has neither."""

import asyncio
import base64
import contextlib
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REFUSAL = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """For 127.0.0.1, signed by itself: the file of its key, and the one that who trusts it names as authority."""
    key, certificate = folder / "key.pem", folder / "ca.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=perdure", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


@contextlib.contextmanager
def tls_proxy(folder: Path, target: int, user_and_password: str) -> Iterator[tuple[int, Path]]:
    """Port of the proxy to 127.0.0.1:`target`, and its authority's certificate. Each connection's first request has to have
    the password."""
    key, certificate = make_certificate(folder)
    command = [sys.executable, __file__, str(key), str(certificate), str(target), user_and_password]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as proxy:  # its own: connections end with it
        assert proxy.stdout
        yield int(proxy.stdout.readline()), certificate
        proxy.kill()


async def _main(key: str, certificate: str, target: int, user_and_password: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    wanted = b"authorization: basic " + base64.b64encode(user_and_password.encode()).lower()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if wanted in head.lower():
                inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", target)
                inner_writer.write(head)
                await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))
            else:
                writer.write(REFUSAL)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the test is over, or dead


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until one side is done: then the other has nothing to wait for."""
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
