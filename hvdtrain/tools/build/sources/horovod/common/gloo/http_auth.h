// Signed requests to the rendezvous server: horovod/runner/http/http_auth.py in C++.
#ifndef HOROVOD_GLOO_HTTP_AUTH_H
#define HOROVOD_GLOO_HTTP_AUTH_H

#include <cstdint>
#include <cstdio>
#include <random>
#include <string>

namespace horovod {
namespace common {
namespace http_auth {

// FIPS 180-4
inline std::string Sha256(const std::string& message) {
  static const uint32_t k[64] = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
      0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
      0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
      0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
      0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
      0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
      0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
  uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const auto rotated = [](uint32_t x, int by) { return x >> by | x << (32 - by); };
  std::string data = message + '\x80';
  data.append((120 - data.size() % 64) % 64, '\0');
  for (int shift = 56; shift >= 0; shift -= 8) {
    data += static_cast<char>(static_cast<uint64_t>(message.size()) * 8 >> shift & 0xff);
  }
  for (size_t at = 0; at < data.size(); at += 64) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) {
      w[i] = 0;
      for (int byte = 0; byte < 4; ++byte) {
        w[i] = w[i] << 8 | static_cast<uint8_t>(data[at + 4 * i + byte]);
      }
    }
    for (int i = 16; i < 64; ++i) {
      const uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (rotated(a, 7) ^ rotated(a, 18) ^ a >> 3) + w[i - 7] +
             (rotated(b, 17) ^ rotated(b, 19) ^ b >> 10);
    }
    uint32_t v[8];
    for (int i = 0; i < 8; ++i) v[i] = h[i];
    for (int i = 0; i < 64; ++i) {
      const uint32_t one = v[7] + (rotated(v[4], 6) ^ rotated(v[4], 11) ^ rotated(v[4], 25)) +
                           ((v[4] & v[5]) ^ (~v[4] & v[6])) + k[i] + w[i];
      const uint32_t two = (rotated(v[0], 2) ^ rotated(v[0], 13) ^ rotated(v[0], 22)) +
                           ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
      for (int j = 7; j > 0; --j) v[j] = v[j - 1];
      v[4] += one;
      v[0] = one + two;
    }
    for (int i = 0; i < 8; ++i) h[i] += v[i];
  }
  std::string digest;
  for (uint32_t word : h) {
    for (int shift = 24; shift >= 0; shift -= 8) digest += static_cast<char>(word >> shift & 0xff);
  }
  return digest;
}

// RFC 2104
inline std::string HmacSha256(std::string key, const std::string& message) {
  if (key.size() > 64) key = Sha256(key);
  std::string inner(64, '\x36'), outer(64, '\x5c');
  for (size_t i = 0; i < key.size(); ++i) {
    inner[i] ^= key[i];
    outer[i] ^= key[i];
  }
  return Sha256(outer + Sha256(inner + message));
}

inline std::string Hex(const std::string& bytes) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  for (unsigned char byte : bytes) {
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

// The bytes of so many pairs of digits; none where a character is no digit.
inline std::string FromHex(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    unsigned int byte;
    int read;
    if (std::sscanf(text.substr(i, 2).c_str(), "%2x%n", &byte, &read) != 1 || read != 2) return "";
    bytes += static_cast<char>(byte);
  }
  return bytes;
}

inline std::string Nonce() {
  std::random_device random;
  std::string bytes;
  for (int i = 0; i < 16; ++i) bytes += static_cast<char>(random() & 0xff);
  return Hex(bytes);
}

// In a time that does not depend on where they differ.
inline bool AreSame(const std::string& a, const std::string& b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

} // namespace http_auth
} // namespace common
} // namespace horovod

#endif // HOROVOD_GLOO_HTTP_AUTH_H
