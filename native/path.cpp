#include "path.hpp"

#include <stdexcept>

#include "sha256.hpp"

namespace kvactors {

const std::string* Path::extra(u32 block) const {
    if (extras.empty()) return nullptr;
    const auto found = extras.find(block);
    return found == extras.end() ? nullptr : &found->second;
}

void Path::set_extra(u32 block, std::string extra) {
    if (block < names.size() || block < nodes.size() || block < fixed)
        throw std::invalid_argument("extra key for a block that already has a name");
    if (extra.size() > 0x7fffffffu) throw std::invalid_argument("extra key longer than 2**31 - 1 bytes");
    if (extra.empty()) {
        extras.erase(block);
    } else {
        extras[block] = std::move(extra);
    }
}

void Path::restart(const Key& new_root) {
    if (!nodes.empty() || !table.empty()) throw std::invalid_argument("the path holds nodes or device blocks");
    names.clear();
    fixed = 0;
    root = new_root;
}

// Arrays of a long path that grow step by step would be copied as a whole at some steps. Capacity
// for twice the blocks costs nothing until it is used.
void Path::make_room() {
    const std::size_t blocks = full_blocks();
    if (blocks < 4096 || (names.capacity() >= blocks && table.capacity() > blocks)) return;
    names.reserve(2 * blocks);
    nodes.reserve(2 * blocks);
    table.reserve(2 * blocks);
    shared.reserve(2 * blocks);
}

void Path::name_to(u32 blocks) {
    u32 i = u32(names.size());
    if (blocks <= i) return;
    make_room();
    ChainHasher hasher(block_size);
    names.resize(blocks);
    for (; i < blocks; ++i) {
        const Key& parent = parent_name(i);
        const std::string* more = extra(i);
        const u8* data = more == nullptr ? nullptr : reinterpret_cast<const u8*>(more->data());
        hasher.name(parent, block_tokens(i), data, more == nullptr ? 0 : u32(more->size()), names[i]);
    }
}

void Path::append(const u32* more, std::size_t count) {
    const std::size_t before = tokens.size();
    tokens.resize(before + count);
    if (count != 0) std::memcpy(tokens.data() + before, more, 4 * count);
}

void Path::assign(u32 start, const u32* blocks, std::size_t count) {
    if (start > table.size()) throw std::invalid_argument("gap: start lies beyond the end of the block table");
    for (std::size_t i = start; i < table.size() && i < start + count; ++i)
        if (shared[i] != 0) throw std::invalid_argument("the block at this position belongs to the tree");
    for (std::size_t i = 0; i < count; ++i)
        if (blocks[i] == kNil) throw std::invalid_argument("device block id out of range");
    const std::size_t end = start + count;
    if (end > table.size()) {
        make_room();
        table.resize(end);
        shared.resize(end, 0);
    }
    if (count != 0) std::memcpy(table.data() + start, blocks, 4 * count);
}

void Path::put(u32 position, u32 block, bool is_shared) {
    table[position] = block;
    shared[position] = is_shared ? 1 : 0;
}

// Tokens appended later may differ: hashes and extra keys of the blocks that lose tokens are stale.
void Path::cut(std::size_t count, std::string extra) {
    tokens.resize(count);
    const u32 full = full_blocks();
    if (names.size() > full) names.resize(full);
    fixed = std::min(fixed, full);
    extras.erase(extras.lower_bound(full), extras.end());
    if (!extra.empty()) extras[full] = std::move(extra);
}

// The blocks after them take their positions: of a flat path, where no block depends on those before it.
void Path::drop_leading(u32 blocks) {
    const auto shorten = [](auto& from, std::size_t count) { from.erase(from.begin(), from.begin() + std::min(count, from.size())); };
    shorten(tokens, std::size_t(blocks) * block_size);
    shorten(names, blocks);
    shorten(nodes, blocks);
    shorten(table, blocks);
    shorten(shared, blocks);
    fixed -= std::min(fixed, blocks);
    committed -= std::min(committed, blocks);
}

}  // namespace kvactors
