// SHA-256 (FIPS 180-4) and the chain of block keys built on it.
#pragma once

#include "common.hpp"

namespace kvactors {

bool sha256_accelerated();

// Any `bytes` may be hashed. With `force_portable` tests compare both implementations.
Key sha256(const u8* data, std::size_t bytes, bool force_portable = false);

// Computes block hashes: key = SHA-256(parent (32) || u32 LE length of extra || extra || tokens as
// u32 LE). Holds one message buffer whose length field and padding are written once per extra
// length.
class ChainHasher {
public:
    explicit ChainHasher(u32 block_size);
    void name(const Key& parent, const u32* tokens, const u8* extra, u32 extra_bytes, Key& out);

private:
    void lay_out(u32 extra_bytes);

    u32 block_size_;
    u32 extra_bytes_ = 0;
    Raw<u8> message_;
};

}  // namespace kvactors
