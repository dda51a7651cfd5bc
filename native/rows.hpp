// The hashes and tokens of the flush notifier's blocks, by row. Rows rise from 1; the caller chooses
// them, and keeps everything else that it knows of a block in arrays by row.
#pragma once

#include <memory>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "table.hpp"

namespace kvactors {

// Two tokens take five bytes, since no vocabulary has 2^20 entries. A block with a larger token is kept
// as it is, apart.
class BlockRows {
public:
    explicit BlockRows(std::size_t token_bytes)
        : tokens_(token_bytes / 4), size_(sizeof(Key) + (5 * tokens_ + 1) / 2), table_(0) {}

    std::size_t token_bytes() const { return 4 * tokens_; }
    std::size_t used() const { return table_.used(); }

    // 0 if no row has the hash.
    u32 find(const Key& hash) const {
        const u32 row = table_.find(start_of(hash), [&](u32 at) { return key(at) == hash; });
        return row == kNil ? 0 : row;
    }

    void put(u32 row, const Key& hash, const u8* tokens) {
        if (row == 0 || row / kPart > parts_.size()) throw std::out_of_range("rows are taken one after the other");
        if (find(hash) != 0) throw std::invalid_argument("a row has this hash");
        if (row / kPart == parts_.size()) parts_.push_back(std::make_unique<u8[]>(kPart * size_));
        std::memcpy(at(row), hash.bytes, sizeof(Key));
        if (!pack(tokens, at(row) + sizeof(Key))) wide_[row].assign(tokens, tokens + token_bytes());
        table_.insert(start_of(hash), row);
    }

    // The row must have been put. Its hash can be read until it is put again.
    void erase(u32 row) {
        table_.erase(start_of(key(row)), row);
        wide_.erase(row);
    }

    bool holds(u32 row) const { return row != 0 && row / kPart < parts_.size() && find(key(row)) == row; }
    const u8* hash(u32 row) const { return known(row); }

    void tokens(u32 row, u8* out) const {
        const u8* packed = known(row) + sizeof(Key);
        const auto wide = wide_.empty() ? wide_.end() : wide_.find(row);
        if (wide != wide_.end()) {
            std::memcpy(out, wide->second.data(), token_bytes());
            return;
        }
        for (std::size_t i = 0; i < tokens_; ++i, out += 4) {
            const u8* from = packed + 5 * i / 2;
            const u32 token = i % 2 ? from[0] >> 4 | from[1] << 4 | from[2] << 12 : from[0] | from[1] << 8 | (from[2] & 15) << 16;
            std::memcpy(out, &token, 4);
        }
    }

private:
    static constexpr u32 kPart = 1024;  // rows in one piece of memory: growing moves none

    bool pack(const u8* tokens, u8* out) const {
        for (std::size_t i = 0; i < tokens_; ++i, tokens += 4) {
            u32 token;
            std::memcpy(&token, tokens, 4);
            if (token >> 20) return false;
            if (i % 2) {
                out[2] |= u8(token << 4);
                out[3] = u8(token >> 4);
                out[4] = u8(token >> 12);
                out += 5;
            } else {
                out[0] = u8(token);
                out[1] = u8(token >> 8);
                out[2] = u8(token >> 16);
            }
        }
        return true;
    }

    static u32 start_of(const Key& hash) {
        u32 start;
        std::memcpy(&start, hash.bytes, sizeof start);
        return start;
    }
    u8* at(u32 row) const { return parts_[row / kPart].get() + row % kPart * size_; }
    const Key& key(u32 row) const { return *reinterpret_cast<const Key*>(at(row)); }
    const u8* known(u32 row) const {
        if (row / kPart >= parts_.size()) throw std::out_of_range("no such row");
        return at(row);
    }

    const std::size_t tokens_, size_;
    std::vector<std::unique_ptr<u8[]>> parts_{};
    std::unordered_map<u32, std::vector<u8>> wide_{};
    Table table_;
};

}  // namespace kvactors
