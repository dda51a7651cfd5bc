// Loads: nodes whose device block is being filled from another tier.
#include <stdexcept>

#include "tree.hpp"

namespace kvactors {

std::vector<u32> Tree::begin_load(Path& path, u32 start, u32 stop) {
    require_held(path, start);
    if (retired_) throw std::invalid_argument("the tree is retired: nothing can be loaded into it");
    if (stop < start || stop > path.full_blocks()) throw std::invalid_argument("load beyond the full blocks of the path");
    if (stop > path.table.size()) throw std::invalid_argument("load into a position without a device block");
    if (path.held() != 0 && gone(path.nodes[0])) throw std::invalid_argument("the blocks of the path were cleared");
    std::vector<u32> known;  // kNil for a new one
    u32 above = node_above(path, start);
    for (u32 i = start; i < stop; ++i) {
        if (path.shared[i] != 0 || path.table[i] == kNil)
            throw std::invalid_argument("load into a position without a private device block");
        const u32 id = i < path.held() ? path.nodes[i] : find_block(path, i, above);
        if (id != kNil && (at(id).bits & (kDevice | kLoading)) != 0)
            throw std::invalid_argument("load of a block that is on the device or loading already");
        known.push_back(id);
        if (!path.flat) above = id;
    }
    path.tree = serial_;
    for (u32 i = path.held(); i < stop; i = path.held()) {
        const u32 id = known[i - start];
        if (id == kNil) {
            create(path, i, path.flat ? i + 1 : stop);
            continue;
        }
        if (i == path.names.size() && at(id).named != 0) path.names.push_back(given_name(id));
        path.nodes.push_back(id);
        acquire(id);
    }
    std::vector<u32> nodes(path.nodes.begin() + start, path.nodes.begin() + stop);
    for (u32 i = start; i < stop; ++i) {
        Node& node = at(path.nodes[i]);
        node.bits |= kLoading;
        node.block = path.table[i];
        path.shared[i] = 1;
    }
    counts_.loading += nodes.size();
    return nodes;
}

// A load of unreferenced nodes ends after their ancestors were listed. A use of a block is a use of
// all blocks before it, so those ancestors become the most recently used again and stay younger
// than their children.
void Tree::freshen_ancestors(u32 id) {
    for (u32 up = at(id).parent; (at(up).bits & kListed) != 0; up = at(up).parent) {
        unlink(up);
        push(up);
    }
}

std::vector<u32> Tree::finish_load(const u32* nodes, std::size_t count, std::size_t good) {
    if (good > count) throw std::invalid_argument("more good blocks than the load has");
    for (std::size_t i = 0; i < count; ++i)
        if (!is_node(nodes[i]) || (at(nodes[i]).bits & kLoading) == 0)
            throw std::invalid_argument("finish of a load that is not in flight");
    std::vector<u32> lost;
    for (std::size_t i = 0; i < count; ++i) {
        Node& node = at(nodes[i]);
        if ((node.bits & kLoading) == 0) throw std::invalid_argument("a node occurs twice in this load");
        node.bits &= u8(~kLoading);
        --counts_.loading;
        const Node& parent = at(node.parent);
        // Under a parent that is being evicted the block would be unreachable after the eviction.
        const bool keep = i < good && ((parent.bits & kRoot) != 0 || is_firm(parent)) &&
                          (!(retired_ || gone(nodes[i])) || node.refs != 0);
        if (keep) {
            take_device(nodes[i], node.block);
        } else {
            lost.push_back(node.block);
            node.block = kNil;
            settle_memory(nodes[i]);
        }
    }
    u32 top = kNil;
    for (std::size_t i = count; i-- > 0;) {
        const Node& node = at(nodes[i]);
        if (node.parent == kFree || node.refs != 0) continue;  // free: removed with its last child
        if (is_firm(node)) {
            if ((node.bits & kListed) == 0) push(nodes[i]);
            top = nodes[i];
        } else {
            reap(nodes[i]);
        }
    }
    if (top != kNil) freshen_ancestors(top);
    return lost;
}

}  // namespace kvactors
