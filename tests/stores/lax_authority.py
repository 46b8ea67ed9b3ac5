"""A certificate authority as people make their own for a MinIO server: its certificate names no key usage."""

import datetime as dt
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class LaxAuthority:
    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority of our own")])
        ca = x509.BasicConstraints(ca=True, path_length=None)
        self._cert = self._signed(self._name, self._key.public_key(), ca, is_critical=True)

    def _signed(
        self, name: x509.Name, key: ec.EllipticCurvePublicKey, of: x509.ExtensionType, *, is_critical: bool
    ) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder(issuer_name=self._name, subject_name=name, public_key=key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(of, critical=is_critical)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )

    def write_to(self, folder: Path) -> str:
        path = folder / "lax-ca.pem"
        path.write_bytes(self._cert.public_bytes(serialization.Encoding.PEM))
        return str(path)

    def context(self, folder: Path) -> ssl.SSLContext:
        """Return what a server on loopback needs."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a server of our own")])
        loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        names = x509.SubjectAlternativeName([x509.DNSName("localhost"), loopback])
        cert = self._signed(name, key.public_key(), names, is_critical=False)
        path = folder / "server.pem"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            + cert.public_bytes(serialization.Encoding.PEM)
        )
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(path)
        return context
