// Matching a path, referencing the nodes met and dropping the references.
#include <algorithm>
#include <stdexcept>

#include "tree.hpp"

namespace kvactors {

void Tree::require(const Path& path) const {
    if (path.block_size != block_size_) throw std::invalid_argument("path and tree differ in block size");
    if (!path.nodes.empty() && path.tree != serial_) throw std::invalid_argument("path holds nodes of another tree");
}

void Tree::require_held(const Path& path, u32 upto) const {
    require(path);
    if (upto > path.held()) throw std::invalid_argument("beyond the nodes this path holds");
}

// Finds the nodes of a path. Returns how many leading ones are known to be on the device, which may
// be fewer than there are.
u32 Tree::walk(const Path& path, u32 limit, std::vector<u32>& found) const {
    found.clear();
    if (retired_) return 0;
    u32 parent = find_root(path.root);
    if (parent == kNil) return 0;
    limit = std::min(limit, path.full_blocks());
    u32 known = 0;
    for (u32 i = 0; i < limit;) {
        bool resident = false;
        const u32 chain = path.extras.empty() && !path.flat ? chain_below(parent, path.block_tokens(i), limit - i, resident) : 0;
        if (chain != 0) {
            const std::size_t before = found.size();
            found.resize(before + chain);
            u32* out = found.data() + before;
            for (u32 j = 0; j < chain; ++j) out[j] = parent + 1 + j;
            parent += chain;
            if (resident && known == before) known += chain;
            i += chain;
            continue;
        }
        const u32 child = find_block(path, i, parent);
        if (child == kNil) break;
        if (known == found.size() && (at(child).bits & kDevice) != 0) ++known;
        found.push_back(child);
        if (!path.flat) parent = child;
        ++i;
    }
    return known;
}

// The node above the block at a position of a path that holds the nodes before it, kNil if there is none.
u32 Tree::node_above(const Path& path, u32 i) const { return path.flat || i == 0 ? find_root(path.root) : path.nodes[i - 1]; }

// The node of a path's block, kNil if there is none. above: the node above it.
u32 Tree::find_block(const Path& path, u32 i, u32 above) const {
    const u32 extra = path.extras.empty() ? 0 : known_extra(path, i);
    return above == kNil || extra == kNil ? kNil : find_child(above, extra, path.block_tokens(i));
}

// Blocks without an extra key that match below a node in ascending ids: their tokens lie side by
// side, and are compared together. resident: whether all of them are known to be on the device.
u32 Tree::chain_below(u32 parent, const u32* tokens, u32 limit, bool& resident) const {
    const u32 first = parent + 1;
    if (first >= next_id_) return 0;
    limit = std::min({limit, std::max(kChainTokens / block_size_, u32(1)), next_id_ - first, nodes_.rows_beside(first)});
    const Node* nodes = nodes_.row(first);
    for (u32 i = limit; i < 2 * limit; i += 2) __builtin_prefetch(nodes + i);  // of the call after this one
    u32 linked = 0;
    u8 bits = kDevice;
    const auto other = [&](u32 i) { return (nodes[i].parent ^ (parent + i)) | nodes[i].extra; };  // 0 for a link of the chain
    for (constexpr u32 kTogether = 8; linked + kTogether <= limit; linked += kTogether) {
        u32 others = 0;
        u8 all = kDevice;
        for (u32 i = linked; i < linked + kTogether; ++i) {
            others |= other(i);
            all &= nodes[i].bits;
        }
        if (others != 0) break;
        bits &= all;
    }
    for (; linked < limit && other(linked) == 0; ++linked) bits &= nodes[linked].bits;
    resident = bits != 0;
    const std::size_t bytes = 4 * std::size_t(block_size_);
    const u32* stored = tokens_of(first);
    if (std::memcmp(stored, tokens, linked * bytes) == 0) return linked;
    u32 same = 0;
    while (std::memcmp(stored, tokens, bytes) == 0) {
        ++same;
        stored += block_size_;
        tokens += block_size_;
    }
    return same;
}

// resident: leading nodes that are known to be on the device.
Match Tree::describe(const std::vector<u32>& found, u32 resident) const {
    Match match{resident, {}};
    while (match.device_run < found.size() && (at(found[match.device_run]).bits & kDevice) != 0) ++match.device_run;
    match.states.reserve(found.size() - match.device_run);
    for (std::size_t i = match.device_run; i < found.size(); ++i)
        match.states.push_back(char(state(at(found[i]))));
    return match;
}

Match Tree::peek(const Path& path, u32 limit) {
    require(path);
    const u32 resident = walk(path, limit, scratch_);
    return describe(scratch_, resident);
}

// The state bits of each block of a flat path, 0 for one that is not known.
std::string Tree::probe(const Path& path, u32 start, u32 stop) const {
    require(path);
    if (!path.flat || stop > path.full_blocks()) throw std::invalid_argument("blocks out of range, or the path is not flat");
    std::string states(stop - start, '\0');
    const u32 root = retired_ ? kNil : find_root(path.root);
    for (u32 i = start; i < stop; ++i) {
        const u32 id = find_block(path, i, root);
        if (id != kNil) states[i - start] = char(state(at(id)));
    }
    return states;
}

// References are closed upwards, so the referenced nodes of a path are a leading run.
u32 Tree::referenced_run(const Path& path, u32 limit) {
    require(path);
    walk(path, limit, scratch_);
    u32 run = 0;
    while (run < scratch_.size() && at(scratch_[run]).refs != 0 && (at(scratch_[run]).bits & kDevice) != 0) ++run;
    return run;
}

// Used nodes of the device run stop being offloaded. A node beyond the run continues: its parent has
// left the device, and keeping it would leave a hole above it.
Match Tree::pin(Path& path, u32 limit, bool used) {
    require(path);
    if (path.held() != 0 || !path.table.empty()) throw std::invalid_argument("the path holds nodes or device blocks");
    const u32 resident = walk(path, limit, scratch_);
    const Match match = describe(scratch_, resident);
    hold(path, limit, match, used);
    return match;
}

// `pin` of a request that needs nothing else: it starts from `root` and holds nothing, every known
// block of it is on the device, these are `least` at least, and the others, up to `blocks` in all,
// are `free` at most. evict: or blocks to be evicted then. Otherwise nothing has changed but the time.
std::optional<u32> Tree::pin_resident(Path& path, const Key& root, u32 limit, u32 least, u32 blocks, long long free, bool evict, double now) {
    require(path);
    if (path.held() != 0 || !path.table.empty() || !(path.root == root)) return std::nullopt;
    advance(now);
    const u32 resident = walk(path, limit, scratch_);
    const Match match = describe(scratch_, resident);
    const u32 run = match.device_run;
    if (!match.states.empty() || run < least || blocks < run) return std::nullopt;
    if (evict && static_cast<long long>(blocks - run) > free) {
        free += static_cast<long long>(counts_.evictable);
        for (u32 i = 0; i < run; ++i) free -= (at(scratch_[i]).bits & kListed) != 0;
    }
    if (static_cast<long long>(blocks - run) > free) return std::nullopt;
    hold(path, limit, match, true);
    return run;
}

// References the nodes that a walk has found.
void Tree::hold(Path& path, u32 limit, const Match& match, bool used) {
    if (policy_ != nullptr || memory_ != nullptr) note_match(path, limit, match);
    const u32 count = u32(scratch_.size());
    if (count == 0) return;
    path.tree = serial_;
    path.make_room();
    path.nodes.assign(scratch_.begin(), scratch_.end());
    path.table.resize(count);
    path.shared.resize(count);
    const u32 together = is_plain() && !path.flat ? match.device_run : 0;
    std::memset(path.shared.data(), 1, together);
    Unlisting unlisting(*this);
    if (used) unlisting.acquire_run<true>(scratch_.data(), together, path.table.data());
    else unlisting.acquire_run<false>(scratch_.data(), together, path.table.data());
    for (u32 i = together; i < count; ++i) {
        const u32 id = scratch_[i];
        Node& node = at(id);
        unlisting.acquire(id, node);
        if (used && node.hits != 0xffff) ++node.hits;
        if (used && i < match.device_run) stay(id, node);
        const bool usable = i < match.device_run || (node.bits & kLoading) != 0;
        path.put(i, usable ? node.block : kNil, usable);
    }
    take_names(path);
    path.committed = match.device_run;
}

// A request whose nodes were pinned without a use has its blocks, or waits for them: those of the
// device run stop being offloaded. In a flat path any of them may be.
void Tree::keep(const Path& path, bool used) {
    require(path);
    for (u32 i = 0; i < path.committed; ++i) stay(path.nodes[i], at(path.nodes[i]));
    for (u32 i = 0; used && i < path.held(); ++i) {
        Node& node = at(path.nodes[i]);
        if (node.hits != 0xffff) ++node.hits;
    }
}

// The names that the path's further nodes have, as far as no node without one is between.
void Tree::take_names(Path& path) const {
    const u32 count = path.held();
    if (path.names.size() >= count) return;
    path.names.reserve(count);
    while (path.names.size() < count) {
        const u32 id = path.nodes[path.names.size()];
        if (at(id).named == 0) return;
        path.names.push_back(given_name(id));
    }
}

std::vector<u32> Tree::trim(Path& path, u32 held) {
    require_held(path, held);
    if (held < path.committed) throw std::invalid_argument("cannot trim below the committed blocks");
    return drop_beyond(path, held);
}

// The path's blocks from `blocks` on are no longer shared: a recomputation must not write into the
// tree's blocks.
std::vector<u32> Tree::retreat(Path& path, u32 blocks) {
    require_held(path, blocks);
    path.committed = std::min(path.committed, blocks);
    return drop_beyond(path, blocks);
}

std::vector<u32> Tree::drop_beyond(Path& path, u32 held) {
    std::vector<u32> freed;
    path.fixed = std::max(path.fixed, path.held());
    while (path.held() > held) {
        const u32 position = path.held() - 1;
        if (position < path.table.size() && path.shared[position] != 0) path.put(position, kNil, false);
        const u32 id = path.nodes[position];
        path.nodes.pop_back();
        let_go(id, freed);
    }
    return freed;
}

// Drops the tokens beyond the first `tokens`, and the table's private blocks that hold none of the
// rest. All checks come first: a refused call changes nothing.
std::vector<u32> Tree::truncate(Path& path, std::size_t tokens, std::string extra) {
    require(path);
    if (tokens > path.tokens.size()) throw std::invalid_argument("the path has fewer tokens");
    if (extra.size() > 0x7fffffffu) throw std::invalid_argument("extra key longer than 2**31 - 1 bytes");
    const u32 full = u32(tokens / block_size_);
    const std::size_t blocks = full + (tokens % block_size_ != 0 ? 1 : 0);
    if (full < path.committed) throw std::invalid_argument("cannot truncate below the committed blocks");
    if (!extra.empty() && blocks == full) throw std::invalid_argument("extra key for a block without tokens");
    for (std::size_t i = full; i < path.table.size(); ++i)
        if (path.shared[i] != 0 && (i < blocks || (at(path.nodes[i]).bits & kLoading) != 0))
            throw std::invalid_argument("cannot truncate within a shared block, or blocks that are being loaded");
    std::vector<u32> freed = drop_beyond(path, std::min(path.held(), full));
    for (std::size_t i = blocks; i < path.table.size(); ++i)
        if (path.table[i] != kNil) freed.push_back(path.table[i]);
    if (path.table.size() > blocks) {
        path.table.resize(blocks);
        path.shared.resize(blocks);
    }
    path.cut(tokens, std::move(extra));
    return freed;
}

// A flat path needs its first blocks no more: the others take their positions.
std::vector<u32> Tree::drop_leading(Path& path, u32 blocks) {
    require(path);
    if (!path.flat || !path.extras.empty() || blocks > path.full_blocks() || blocks > path.table.size())
        throw std::invalid_argument("blocks out of range, or the path is not flat, or has extra keys");
    std::vector<u32> freed;
    for (u32 i = 0; i < blocks; ++i) {
        if (path.shared[i] != 0 && (at(path.nodes[i]).bits & kLoading) != 0) throw std::invalid_argument("blocks that are being loaded");
    }
    for (u32 i = 0; i < blocks; ++i) {
        if (path.shared[i] == 0 && path.table[i] != kNil) freed.push_back(path.table[i]);
        if (i < path.held()) let_go(path.nodes[i], freed);
    }
    path.drop_leading(blocks);
    return freed;
}

// Drops one reference of each node, the last one first. The end of the list stays in registers.
void Tree::let_go_run(const u32* first, const u32* end, bool flat, std::vector<u32>& freed) {
    if (!is_plain() || retired_ || flat) {
        while (end != first) let_go(*--end, freed);
        return;
    }
    u32 tail = tails_[kPlainLevel], dropped = 0, listed = 0, read = 0;
    Node* last = tail == kNil ? nullptr : &at(tail);
    Slab<Node, 1>::Cursor rows = nodes_.cursor();
    const u32* stop = end;  // of the nodes that the policy does not have in its list yet
    const auto list_from = [&](const u32* start) {
        if (policy_ != nullptr && start != stop) policy_->list_run(start, u32(stop - start));
    };
    while (end != first) {
        const u32 id = *--end;
        Node& node = rows[id];
        const bool referenced = --node.refs != 0;
        dropped += !referenced;
        if (referenced || !is_firm(node)) {
            list_from(end + 1);
            stop = end;
            if (!referenced) let_go_last(id, freed);  // no node of the list changes
            continue;
        }
        node.bits |= kListed;
        node.prev = tail;
        node.next = kNil;
        if (last == nullptr) heads_[kPlainLevel] = id;
        else last->next = id;
        last = &node;
        tail = id;
        ++listed;
        read += node.pending != 0;
    }
    list_from(end);
    tails_[kPlainLevel] = tail;
    counts_.referenced -= dropped;
    counts_.evictable += listed;
    read_ += read;
}

// Deepest first, so that in the list a parent is always younger than its children and the eldest is
// always a leaf.
std::vector<u32> Tree::release(Path& path) {
    require(path);
    std::vector<u32> freed;
    path.fixed = std::max(path.fixed, path.held());
    const u8* shared = path.shared.data();
    for (std::size_t i = 0, size = path.table.size(); i < size; ++i) {
        const void* own = std::memchr(shared + i, 0, size - i);
        if (own == nullptr) break;
        i = std::size_t(static_cast<const u8*>(own) - shared);
        if (path.table[i] != kNil) freed.push_back(path.table[i]);
    }
    let_go_run(path.nodes.data(), path.nodes.data() + path.nodes.size(), path.flat, freed);
    path.nodes.clear();
    path.table.clear();
    path.shared.clear();
    path.committed = 0;
    path.tree = 0;
    return freed;
}

// `to` becomes a second path of the same tokens: it references the same nodes and has the same
// device blocks for its full blocks. A private block then has two owners, which return it once
// each. A block that is not full stays with `from` alone, since each path continues it.
std::vector<u32> Tree::fork(const Path& from, Path& to) {
    require(from);
    if (to.block_size != block_size_ || to.flat != from.flat) throw std::invalid_argument("path and tree differ in block size, or the paths in kind");
    if (!to.tokens.empty() || !to.nodes.empty() || !to.table.empty()) throw std::invalid_argument("the fork is no empty path");
    to.root = from.root;
    to.salt = from.salt;
    to.forgotten = from.forgotten;
    to.tokens = from.tokens;
    to.names = from.names;
    to.fixed = std::max(from.fixed, from.held());
    to.extras = from.extras;
    to.nodes = from.nodes;
    to.table = from.table;
    to.shared = from.shared;
    const std::size_t blocks = std::min(to.table.size(), std::size_t(to.full_blocks()));
    to.table.resize(blocks);
    to.shared.resize(blocks);
    to.committed = from.committed;
    to.tree = from.tree;
    for (const u32 id : to.nodes) acquire(id);
    if (policy_ != nullptr || memory_ != nullptr) note_match(to, to.full_blocks(), Match{to.committed, {}});
    std::vector<u32> owned;
    for (std::size_t i = 0; i < blocks; ++i)
        if (to.shared[i] == 0 && to.table[i] != kNil) owned.push_back(to.table[i]);
    return owned;
}

u32 Tree::mark_announced(Path& path, u32 start, u32 stop) {
    require_held(path, stop);
    u32 first = stop;
    for (u32 i = stop; i-- > start;) {
        Node& node = at(path.nodes[i]);
        if ((node.bits & kAnnounced) == 0) first = i;
        node.bits |= kAnnounced;
    }
    return first;
}

std::vector<u32> Tree::worth_saving(const Path& path, u32 start, u32 stop, u32 min_hits) const {
    require_held(path, stop);
    std::vector<u32> positions;
    for (u32 i = start; i < stop; ++i)
        if (at(path.nodes[i]).hits >= min_hits) positions.push_back(i);
    return positions;
}

}  // namespace kvactors
