"""Writes PDFs whose reading order is known: text at places, classic tables or object streams, encrypted by each method (ISO 32000-2).

pdf = Pdf(); page = pdf.page(); page.text(72, 720, "Words", size=12, bold=True); data = pdf.data()
"""

import hashlib
import os
import zlib

PAD = bytes.fromhex("28BF4E5E4E758A4164004E56FFFA01082E2E00B6D0683E802F0CA9FE6453697A")
FONTS = {"F0": "Helvetica", "F1": "Helvetica-Bold", "F2": "Courier"}
# Widths of Helvetica's characters 32 to 126, in thousandths (Adobe's AFM of the standard 14 fonts).
WIDTHS = [
    278,
    278,
    355,
    556,
    556,
    889,
    667,
    191,
    333,
    333,
    389,
    584,
    278,
    333,
    278,
    278,
    *[556] * 10,
    278,
    278,
    584,
    584,
    584,
    556,
    1015,
]
WIDTHS += [
    667,
    667,
    722,
    722,
    667,
    611,
    778,
    722,
    278,
    500,
    667,
    556,
    833,
    722,
    778,
    667,
    778,
    722,
    667,
    611,
    722,
    667,
    944,
    667,
    667,
    611,
]
WIDTHS += [
    278,
    278,
    278,
    469,
    556,
    333,
    556,
    556,
    500,
    556,
    556,
    278,
    556,
    556,
    222,
    222,
    500,
    222,
    833,
    556,
    556,
    556,
    556,
    333,
    500,
    278,
]
WIDTHS += [556, 500, 722, 500, 500, 500, 334, 260, 334, 584]


def width(text: str, size: float) -> float:
    return sum(WIDTHS[ord(letter) - 32] for letter in text) * size / 1000


def wrapped(text: str, wide: float, size: float, hyphenate: bool = False) -> list[str]:
    """Lines of at most `wide` points. hyphenate: words of ten letters and more are cut where they do not fit."""
    lines, line = [], ""
    for word in text.split():
        joined = f"{line} {word}".strip()
        if width(joined, size) <= wide:
            line = joined
            continue
        if hyphenate and len(word) >= 10 and word.isalpha():
            for cut in range(len(word) - 3, 3, -1):
                if width(f"{line} {word[:cut]}-".strip(), size) <= wide:
                    line, word = f"{line} {word[:cut]}-".strip(), word[cut:]
                    break
        lines.append(line)
        line = word
    return [*lines, line]


class Page:
    def __init__(self, wide: float = 612, high: float = 792, rotate: int = 0):
        self.wide, self.high, self.rotate, self.parts, self.images = wide, high, rotate, [], []

    def text(self, x: float, y: float, text: str, size: float = 10, bold: bool = False, mono: bool = False) -> None:
        font = "F2" if mono else "F1" if bold else "F0"
        escaped = text.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")
        self.parts.append(f"BT /{font} {size} Tf 1 0 0 1 {x} {y} Tm ({escaped}) Tj ET")

    def lines(self, x: float, y: float, lines: list[str], size: float = 10, leading: float = 0, **font) -> float:
        """Lines under each other from a baseline; the next baseline."""
        for line in lines:
            self.text(x, y, line, size, **font)
            y -= leading or 1.2 * size
        return y

    def box(self, x: float, y: float, wide: float, high: float) -> None:
        self.parts.append(f"{x} {y} {wide} {high} re f")


class Pdf:
    def __init__(self) -> None:
        self.pages: list[Page] = []
        self.title = ""

    def page(self, *size, **kept) -> Page:
        self.pages.append(Page(*size, **kept))
        return self.pages[-1]

    def objects(self, compress: bool) -> dict[int, bytes]:
        """Number → body: 1 the catalog, 2 the tree, 3 the properties, then fonts, pages, contents."""
        found = {1: b"<</Type/Catalog/Pages 2 0 R>>", 3: f"<</Title({self.title})>>".encode("latin-1")}
        for number, name in enumerate(FONTS.values(), 4):
            found[number] = f"<</Type/Font/Subtype/Type1/BaseFont/{name}/Encoding/WinAnsiEncoding>>".encode()
        fonts = "".join(f"/{name} {number} 0 R" for number, name in enumerate(FONTS, 4))
        kids, number = [], 7
        for page in self.pages:
            content = "\n".join(page.parts).encode("latin-1")
            packed = zlib.compress(content) if compress else content
            head = f"<</Length {len(packed)}{'/Filter/FlateDecode' if compress else ''}>>"
            found[number + 1] = head.encode() + b"stream\n" + packed + b"\nendstream"
            found[number] = (
                f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 {page.wide} {page.high}]/Rotate {page.rotate}"
                f"/Contents {number + 1} 0 R/Resources<</Font<<{fonts}>>>>>>"
            ).encode()
            kids.append(f"{number} 0 R")
            number += 2
        found[2] = f"<</Type/Pages/Count {len(kids)}/Kids[{' '.join(kids)}]>>".encode()
        return dict(sorted(found.items()))

    def data(
        self, compress: bool = True, object_streams: bool = False, encryption: "Encryption | None" = None
    ) -> bytes:
        objects = self.objects(compress)
        if object_streams:
            return with_object_streams(objects)
        extra = ""
        if encryption is not None:
            number = max(objects) + 1
            objects = {key: encryption.body(key, body) for key, body in objects.items()}
            objects[number] = encryption.dictionary()
            extra = f"/Encrypt {number} 0 R/ID[<{encryption.id.hex()}><{encryption.id.hex()}>]"
        return with_table(objects, extra)


def with_table(objects: dict[int, bytes], extra: str = "", head: bytes = b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n") -> bytes:
    """A file with a classic cross-reference table."""
    out, places = bytearray(head), {}
    for number, body in objects.items():
        places[number] = len(out)
        out += b"%d 0 obj\n" % number + body + b"\nendobj\n"
    size, start = max(objects) + 1, len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % size
    for number in range(1, size):
        out += b"%010d 00000 n \n" % places[number] if number in places else b"0000000000 00000 f \n"
    return bytes(out + f"trailer\n<</Size {size}/Root 1 0 R/Info 3 0 R{extra}>>\nstartxref\n{start}\n%%EOF\n".encode())


def with_object_streams(objects: dict[int, bytes]) -> bytes:
    """A file whose objects but streams lie in an object stream, found by a cross-reference stream (PDF 1.5)."""
    out, places = bytearray(b"%PDF-1.5\n%\xe2\xe3\xcf\xd3\n"), {}
    inner = {number: body for number, body in objects.items() if b"stream\n" not in body}
    for number, body in objects.items():
        if number not in inner:
            places[number] = len(out)
            out += b"%d 0 obj\n" % number + body + b"\nendobj\n"
    holder, table = max(objects) + 1, max(objects) + 2
    heads, bodies = [], b""
    for number, body in inner.items():
        heads.append(b"%d %d" % (number, len(bodies)))
        bodies += body + b"\n"
    first = b" ".join(heads) + b"\n"
    packed = zlib.compress(first + bodies)
    places[holder] = len(out)
    head = f"<</Type/ObjStm/N {len(inner)}/First {len(first)}/Length {len(packed)}/Filter/FlateDecode>>"
    out += b"%d 0 obj\n" % holder + head.encode() + b"stream\n" + packed + b"\nendstream\nendobj\n"
    places[table] = start = len(out)
    order = {number: index for index, number in enumerate(inner)}
    rows = b"\0\0\0\0\0\xff"
    for number in range(1, table + 1):
        if number in order:
            rows += b"\2" + holder.to_bytes(4, "big") + bytes([order[number]])
        else:
            rows += b"\1" + places[number].to_bytes(4, "big") + b"\0"
    packed = zlib.compress(rows)
    head = f"<</Type/XRef/Size {table + 1}/W[1 4 1]/Root 1 0 R/Info 3 0 R/Length {len(packed)}/Filter/FlateDecode>>"
    out += b"%d 0 obj\n" % table + head.encode() + b"stream\n" + packed + b"\nendstream\nendobj\n"
    return bytes(out + f"startxref\n{start}\n%%EOF\n".encode())


# -- encryption (ISO 32000-2, 7.6)


def rc4(key: bytes, data: bytes) -> bytes:
    state, j = list(range(256)), 0
    for i in range(256):
        j = (j + state[i] + key[i % len(key)]) & 255
        state[i], state[j] = state[j], state[i]
    out, i, j = bytearray(), 0, 0
    for byte in data:
        i = (i + 1) & 255
        j = (j + state[i]) & 255
        state[i], state[j] = state[j], state[i]
        out.append(byte ^ state[(state[i] + state[j]) & 255])
    return bytes(out)


def _aes_tables() -> tuple[list[int], list[int]]:
    box, p, q = [0] * 256, 1, 1
    while True:
        p = p ^ (p << 1) & 255 ^ (0x1B if p & 0x80 else 0)
        q ^= q << 1
        q ^= q << 2
        q = (q ^ q << 4) & 255
        q ^= 0x09 if q & 0x80 else 0
        x = q ^ (q << 1 | q >> 7) ^ (q << 2 | q >> 6) ^ (q << 3 | q >> 5) ^ (q << 4 | q >> 4)
        box[p] = (x ^ 0x63) & 255
        if p == 1:
            break
    box[0] = 0x63
    return box, [(byte << 1 ^ (0x1B if byte & 0x80 else 0)) & 255 for byte in range(256)]


_BOX, _TWICE = _aes_tables()
_SHIFT = [0, 5, 10, 15, 4, 9, 14, 3, 8, 13, 2, 7, 12, 1, 6, 11]


def _mixed_tables() -> list[list[int]]:
    """For each byte of a block: what it adds to the block after SubBytes, ShiftRows and MixColumns."""
    tables = []
    for place in range(16):
        column, row = divmod(_SHIFT.index(place), 4)
        table = []
        for byte in range(256):
            one = _BOX[byte]
            two, three = _TWICE[one], _TWICE[one] ^ one
            new = [0] * 16
            for offset, value in zip(range(4), (two, one, one, three)):
                new[4 * column + (row + offset) % 4] = value
            table.append(int.from_bytes(bytes(new), "big"))
        tables.append(table)
    return tables


_MIXED = _mixed_tables()


def aes_cbc(key: bytes, iv: bytes, data: bytes) -> bytes:
    """AES in CBC mode (FIPS 197); data: whole blocks."""
    words = [list(key[at : at + 4]) for at in range(0, len(key), 4)]
    num, round_constant = len(words), 1
    for at in range(num, 4 * (num + 7)):
        word = words[-1]
        if at % num == 0:
            word = [_BOX[byte] for byte in word[1:] + word[:1]]
            word[0] ^= round_constant
            round_constant = _TWICE[round_constant]
        elif num > 6 and at % num == 4:
            word = [_BOX[byte] for byte in word]
        words.append([a ^ b for a, b in zip(words[at - num], word)])
    keys = [
        int.from_bytes(bytes(byte for word in words[at : at + 4] for byte in word), "big")
        for at in range(0, len(words), 4)
    ]
    out, last = [], int.from_bytes(iv, "big")
    for at in range(0, len(data), 16):
        state = int.from_bytes(data[at : at + 16], "big") ^ last ^ keys[0]
        for key_part in keys[1:-1]:
            mixed = key_part
            for table, byte in zip(_MIXED, state.to_bytes(16, "big")):
                mixed ^= table[byte]
            state = mixed
        s = state.to_bytes(16, "big")
        last = int.from_bytes(bytes(_BOX[s[place]] for place in _SHIFT), "big") ^ keys[-1]
        out.append(last.to_bytes(16, "big"))
    return b"".join(out)


def _padded(data: bytes) -> bytes:
    return data + bytes([16 - len(data) % 16]) * (16 - len(data) % 16)


class Encryption:
    """method: "rc4-40", "rc4-128", "aes-128" or "aes-256"."""

    def __init__(self, method: str, password: str):
        self.method, self.id, self.password = method, bytes(range(16)), password.encode()
        self.permissions = 0xFFFFFFFC
        self._256() if method == "aes-256" else self._md5()

    def _md5(self) -> None:
        size, revision = (5, 2) if self.method == "rc4-40" else (16, 4 if self.method == "aes-128" else 3)
        padded = (self.password + PAD)[:32]
        digest = hashlib.md5(padded).digest()
        for _ in range(50 if revision > 2 else 0):
            digest = hashlib.md5(digest).digest()
        owner = padded
        for number in range(20 if revision > 2 else 1):
            owner = rc4(bytes(byte ^ number for byte in digest[:size]), owner)
        digest = hashlib.md5(padded + owner + self.permissions.to_bytes(4, "little") + self.id).digest()
        for _ in range(50 if revision > 2 else 0):
            digest = hashlib.md5(digest[:size]).digest()
        self.key = digest[:size]
        if revision == 2:
            user = rc4(self.key, PAD)
        else:
            user = hashlib.md5(PAD + self.id).digest()
            for number in range(20):
                user = rc4(bytes(byte ^ number for byte in self.key), user)
            user += bytes(16)
        self.owner, self.user, self.revision, self.size = owner, user, revision, size

    def _256(self) -> None:
        self.key, self.revision = hashlib.sha256(b"key" + self.password).digest(), 6
        none = bytes(16)
        self.user = _hash_2b(self.password, b"validate", b"") + b"validatekey-salt"
        self.user_key = aes_cbc(_hash_2b(self.password, b"key-salt", b""), none, self.key)
        self.owner, self.owner_key = bytes(48), bytes(32)  # there is no owner's password that opens it
        plain = self.permissions.to_bytes(4, "little") + b"\xff\xff\xff\xffTadbabcd"
        self.perms = aes_cbc(self.key, none, plain)  # one block: ECB

    def dictionary(self) -> bytes:
        signed = self.permissions - 2**32
        head = f"<</Filter/Standard/R {self.revision}/P {signed}/O<{self.owner.hex()}>/U<{self.user.hex()}>"
        if self.method == "aes-256":
            head += f"/V 5/Length 256/OE<{self.owner_key.hex()}>/UE<{self.user_key.hex()}>/Perms<{self.perms.hex()}>"
            head += "/CF<</StdCF<</CFM/AESV3/AuthEvent/DocOpen/Length 32>>>>/StmF/StdCF/StrF/StdCF"
        elif self.method == "aes-128":
            head += "/V 4/Length 128/CF<</StdCF<</CFM/AESV2/AuthEvent/DocOpen/Length 16>>>>/StmF/StdCF/StrF/StdCF"
        else:
            head += f"/V {1 if self.revision == 2 else 2}/Length {8 * self.size}"
        return (head + ">>").encode()

    def body(self, number: int, body: bytes) -> bytes:
        """An object with its stream encrypted. Strings stay as they are, so that none but an empty title may be there."""
        head, mark, rest = body.partition(b"stream\n")
        if not mark:
            return body
        data = rest.removesuffix(b"\nendstream")
        if self.method == "aes-256":
            key = self.key
        else:
            salt = b"sAlT" if self.method == "aes-128" else b""
            full = self.key + number.to_bytes(3, "little") + b"\0\0" + salt
            key = hashlib.md5(full).digest()[: min(len(self.key) + 5, 16)]
        if self.method.startswith("rc4"):
            packed = rc4(key, data)
        else:
            iv = os.urandom(16)
            packed = iv + aes_cbc(key, iv, _padded(data))
        head = head.replace(b"/Length %d" % len(data), b"/Length %d" % len(packed))
        return head + mark + packed + b"\nendstream"


def _hash_2b(password: bytes, salt: bytes, user: bytes) -> bytes:
    """Algorithm 2.B: SHA-2 and AES by turns, 64 times and more."""
    digest, number = hashlib.sha256(password + salt + user).digest(), 0
    while True:
        mixed = aes_cbc(digest[:16], digest[16:32], (password + digest + user) * 64)
        digest = (hashlib.sha256, hashlib.sha384, hashlib.sha512)[sum(mixed[:16]) % 3](mixed).digest()
        number += 1
        if number >= 64 and mixed[-1] <= number - 32:
            return digest[:32]
