// Matching a path, holding what was met and giving it back.
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

void Tree::walk(const Path& path, u32 limit, std::vector<u32>& found) const {
    found.clear();
    u32 parent = retired_ ? kNil : find_root(path.root);
    if (parent == kNil) return;
    limit = std::min(limit, path.full_blocks());
    for (u32 i = 0; i < limit; ++i) {
        const u32 extra = path.extras.empty() ? 0 : known_extra(path, i);
        if (extra == kNil) return;
        const u32 child = find_child(parent, extra, path.block_tokens(i), parent + 1);
        if (child == kNil) return;
        found.push_back(child);
        parent = child;
    }
}

Match Tree::describe(const std::vector<u32>& found) const {
    Match match{0, {}};
    while (match.device_run < found.size() && (at(found[match.device_run]).bits & kDevice) != 0) ++match.device_run;
    match.states.reserve(found.size() - match.device_run);
    for (std::size_t i = match.device_run; i < found.size(); ++i)
        match.states.push_back(char(at(found[i]).bits & kStateBits));
    return match;
}

Match Tree::peek(const Path& path, u32 limit) {
    require(path);
    walk(path, limit, scratch_);
    return describe(scratch_);
}

// Nodes of the device run stop being offloaded. One beyond the run goes on: its parent has left the device, and keeping
// it would leave a hole above it.
Match Tree::pin(Path& path, u32 limit) {
    require(path);
    if (!path.nodes.empty() || !path.table.empty())
        throw std::invalid_argument("path already holds nodes or device blocks");
    walk(path, limit, scratch_);
    Match match = describe(scratch_);
    const u32 count = u32(scratch_.size());
    if (count == 0) return match;
    path.tree = serial_;
    path.nodes.resize(count);
    path.table.resize(count);
    path.shared.resize(count);
    const u32 named = u32(path.names.size());
    if (named < count) path.names.resize(count);
    for (u32 i = 0; i < count; ++i) {
        const u32 id = scratch_[i];
        Node& node = at(id);
        acquire(id);
        if (node.hits != 0xffff) ++node.hits;
        if (i < match.device_run && (node.bits & kOffloading) != 0) {
            node.bits &= u8(~kOffloading);
            --counts_.offloading;
        }
        const bool usable = i < match.device_run || (node.bits & kLoading) != 0;
        path.nodes[i] = id;
        path.put(i, usable ? node.block : kNil, usable);
        if (i >= named) path.names[i] = node.name;
    }
    path.committed = match.device_run;
    return match;
}

std::vector<u32> Tree::trim(Path& path, u32 held) {
    require_held(path, held);
    if (held < path.committed) throw std::invalid_argument("cannot trim below the committed blocks");
    return drop_beyond(path, held);
}

// The path's blocks from `blocks` on are shared no longer: whoever computes them again must not write into the tree's.
std::vector<u32> Tree::retreat(Path& path, u32 blocks) {
    require_held(path, blocks);
    path.committed = std::min(path.committed, blocks);
    return drop_beyond(path, blocks);
}

std::vector<u32> Tree::drop_beyond(Path& path, u32 held) {
    std::vector<u32> freed;
    while (path.held() > held) {
        const u32 position = path.held() - 1;
        if (position < path.table.size() && path.shared[position] != 0) path.put(position, kNil, false);
        const u32 id = path.nodes[position];
        path.nodes.pop_back();
        let_go(id, freed);
    }
    return freed;
}

// Deepest first, so that in the list a parent is always younger than its children and the eldest is always a leaf.
std::vector<u32> Tree::release(Path& path) {
    require(path);
    std::vector<u32> freed;
    for (std::size_t i = 0; i < path.table.size(); ++i)
        if (path.shared[i] == 0 && path.table[i] != kNil) freed.push_back(path.table[i]);
    for (std::size_t i = path.nodes.size(); i-- > 0;) let_go(path.nodes[i], freed);
    path.nodes.clear();
    path.table.clear();
    path.shared.clear();
    path.committed = 0;
    path.tree = 0;
    return freed;
}

bool Tree::mark_announced(Path& path, u32 upto) {
    require_held(path, upto);
    bool any = false;
    for (u32 i = 0; i < upto; ++i) {
        Node& node = at(path.nodes[i]);
        any |= (node.bits & kAnnounced) == 0;
        node.bits |= kAnnounced;
    }
    return any;
}

void Tree::clear_announced() {
    for (u32 id = 0; id < next_id_; ++id)
        if (is_node(id)) at(id).bits &= u8(~kAnnounced);
}

std::vector<u32> Tree::worth_saving(const Path& path, u32 upto, u32 min_hits) const {
    require_held(path, upto);
    std::vector<u32> positions;
    for (u32 i = 0; i < upto; ++i)
        if (at(path.nodes[i]).hits >= min_hits) positions.push_back(i);
    return positions;
}

}  // namespace kvactors
