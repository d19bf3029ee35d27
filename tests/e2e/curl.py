#!/usr/bin/env python3
"""A substitute for curl with the options used by the transcripts in docs/sandbox.md."""

import http.client
import sys
import urllib.parse
from pathlib import Path


def content(text: str) -> bytes:
    if not text.startswith("@"):
        return text.encode()
    return sys.stdin.buffer.read() if text == "@-" else Path(text[1:]).read_bytes()


def main(words: list[str]) -> None:
    headers: list[str] = []
    form: list[bytes] = []
    method, url, shows_head = "", "", False
    while words:
        word = words.pop(0)
        if word == "-sS":
            continue
        if word == "-i":
            shows_head = True
        elif word == "-X":
            method = words.pop(0)
        elif word == "-H":
            text = words.pop(0)
            headers += content(text).decode().splitlines() if text.startswith("@") else [text]
        elif word in {"-d", "--data-binary"}:
            body = content(words.pop(0))
            form.append(body if word == "--data-binary" else body.replace(b"\n", b"").replace(b"\r", b""))
        else:
            assert not word.startswith("-"), word
            url = word
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.netloc)
    sent = dict(header.split(": ", 1) for header in headers)
    if form:
        sent.setdefault("Content-Type", "application/x-www-form-urlencoded")
    path = f"{address.path}?{address.query}" if address.query else address.path
    connection.request(method or ("POST" if form else "GET"), path, b"&".join(form) or None, sent)
    answer = connection.getresponse()
    if shows_head:
        print(f"HTTP/1.1 {answer.status} {answer.reason}")
        for name, value in answer.getheaders():
            print(f"{name}: {value}")
        print(flush=True)
    sys.stdout.buffer.write(answer.read())


main(sys.argv[1:])
