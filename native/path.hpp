// One request's tokens, its block hashes, the nodes it holds and its device block table.
#pragma once

#include <algorithm>
#include <map>
#include <string>

#include "common.hpp"

namespace kvactors {

// What an eviction policy that learns needs of the time when a path was matched.
struct Seen {
    u64 order = 0;  // see Mark in retain.hpp
    u32 inside = 0;
    u32 hits = 0;  // leading blocks that were found
};

struct Acquired {
    double time = 0;
    u32 limit = 0;  // leading blocks that could be found
    Seen device, memory;  // memory: device and host together
};

class Path {
public:
    Path(u32 block_size, const Key& root, bool flat = false) : block_size(block_size), root(root), flat(flat) {}

    u32 full_blocks() const { return u32(tokens.size() / block_size); }
    u32 plain_blocks() const {  // leading full blocks without an extra key in their path
        return extras.empty() ? full_blocks() : std::min(full_blocks(), extras.begin()->first);
    }
    u32 held() const { return u32(nodes.size()); }
    const u32* block_tokens(u32 block) const { return tokens.data() + std::size_t(block) * block_size; }
    const std::string* extra(u32 block) const;

    void set_extra(u32 block, std::string extra);
    void restart(const Key& new_root);  // the same tokens below another root
    void make_room();
    void name_to(u32 blocks);  // afterwards names has at least `blocks` entries
    void append(const u32* more, std::size_t count);
    void assign(u32 start, const u32* blocks, std::size_t count);
    void put(u32 position, u32 block, bool is_shared);
    void cut(std::size_t count, std::string extra);  // extra: of the block that ends within
    void drop_leading(u32 blocks);
    const Key& parent_name(u32 block) const { return flat || block == 0 ? root : names[block - 1]; }  // once named

    u32 block_size;
    Key root;
    bool flat;                           // every block is a child of the root: see Tree
    Raw<u32> tokens;
    Raw<Key> names;                      // of the leading blocks, as far as they were needed
    u32 fixed = 0;                       // leading blocks that a tree has had: with their extra keys
    std::map<u32, std::string> extras;   // few blocks have one
    Raw<u32> nodes;                      // referenced by this path: blocks 0 .. held() - 1
    Raw<u32> table;                      // device blocks, kNil where none is assigned
    Raw<u8> shared;                      // per table entry: 1 where the block is the tree's
    u32 committed = 0;
    u64 tree = 0;                        // serial number of the tree the nodes belong to
    u64 salt = 0;                        // a digest of the salt, 0 for none
    bool forgotten = false;              // nothing more of it is entered into a tree
    Acquired acquired;                   // for an eviction policy that learns
};

}  // namespace kvactors
