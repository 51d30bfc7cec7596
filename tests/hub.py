"""A server of this machine that speaks as the Hugging Face hub does."""

import contextlib
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from huggingface_hub import constants


def commit(folder):
    """A number of what is in a folder, as git gives one to each commit."""
    contents = [(file.name, file.read_bytes()) for file in sorted(folder.iterdir())]
    return hashlib.sha1(repr(contents).encode()).hexdigest()


def served(repository, folder, path, asked):
    """What the hub has at a path: a file, or the list of files; None for anything else."""
    name = re.escape(repository)
    if match := re.fullmatch(rf"/{name}/resolve/[^/]+/(.+)", path):
        asked.append(match[1])
        file = folder / match[1]
        return file.read_bytes() if file.is_file() else None
    if not re.fullmatch(rf"/api/models/{name}(/revision/[^/]+|/tree/[^/]+)?", path):
        return None
    asked.append(path)
    names = sorted(file.name for file in folder.iterdir())
    about = {
        "id": repository,
        "sha": commit(folder),
        "siblings": [{"rfilename": n} for n in names],
    }
    tree = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in names]
    return json.dumps(tree if "/tree/" in path else about).encode()


def answers(repository, folder, asked):
    """A handler that serves a repository from a folder: its list of files, and each of them."""

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.reply(body=False)

        def do_GET(self):
            self.reply(body=True)

        def reply(self, body):
            path = self.path.partition("?")[0]
            content = served(repository, folder, path, asked)
            self.send_response(404 if content is None else 200)
            if content is None:
                missing = "EntryNotFound" if f"/{repository}/" in path else "RepoNotFound"
                self.send_header("X-Error-Code", missing)
                content = b""
            self.send_header("X-Repo-Commit", commit(folder))
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_):
            pass

    return Hub


@contextlib.contextmanager
def serving(repository, tmp_path, monkeypatch):
    """A hub with one repository: the folder that it serves, and a list of what is asked of it."""
    folder, asked = tmp_path / "repository", []
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), answers(repository, folder, asked))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
    )
    yield folder, asked
    server.shutdown()
    server.server_close()
    thread.join()
