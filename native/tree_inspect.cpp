// Looking at the whole tree: listings for tests and tools, and the check of every invariant.
#include <stdexcept>

#include "sha256.hpp"
#include "tree.hpp"

namespace kvactors {
namespace {

void expect(bool holds, const char* what, u64 id) {
    if (!holds) throw std::runtime_error("block tree is damaged: " + std::string(what) + " (node " + std::to_string(id) + ")");
}

}  // namespace

std::vector<Key> Tree::device_keys() const {
    std::vector<Key> keys;
    keys.reserve(counts_.device);
    for (u32 id = 0; id < next_id_; ++id)
        if (is_node(id) && (at(id).bits & kDevice) != 0) keys.push_back(at(id).name);
    return keys;
}

std::vector<Leaf> Tree::leaves() const {
    std::vector<Leaf> result;
    for (u32 id = 0; id < next_id_; ++id) {
        if (!is_node(id) || at(id).children != 0) continue;
        std::vector<u32> chain;
        u32 up = id;
        for (; (at(up).bits & kRoot) == 0; up = at(up).parent) chain.push_back(up);
        Leaf leaf;
        leaf.root = at(up).name;
        for (std::size_t i = chain.size(); i-- > 0;) {
            const u32* tokens = tokens_of(chain[i]);
            leaf.tokens.insert(leaf.tokens.end(), tokens, tokens + block_size_);
            leaf.keys.push_back(at(chain[i]).name);
            leaf.states.push_back(char(at(chain[i]).bits & kStateBits));
        }
        result.push_back(std::move(leaf));
    }
    return result;
}

std::size_t Tree::bytes() const {
    return sizeof(*this) + nodes_.bytes() + tokens_.bytes() + children_.bytes() + names_.bytes();
}

void Tree::check() const {
    Statistics seen;
    std::vector<u32> children(next_id_, 0), extra_uses(extras_.size(), 0), place(next_id_, 0);
    std::size_t roots = 0, free = 0;
    u32 before = kNil;
    for (u32 id = head_; id != kNil; before = id, id = at(id).next) {
        expect(is_node(id) && (at(id).bits & kListed) != 0 && at(id).prev == before, "list of evictable nodes", id);
        place[id] = u32(++seen.evictable);
        expect(seen.evictable <= counts_.evictable, "list of evictable nodes is too long", id);
    }
    expect(tail_ == before, "tail of the list", tail_);
    for (u32 id = free_; id != kNil && free <= next_id_; id = at(id).next, ++free)
        expect(at(id).parent == kFree, "list of free nodes", id);
    ChainHasher hasher(block_size_);
    for (u32 id = 0; id < next_id_; ++id) {
        if (!is_used(id)) continue;
        const Node& node = at(id);
        if ((node.bits & kRoot) != 0) {
            ++roots;
            expect(node.parent == kNil && find_root(node.name) == id, "root", id);
            continue;
        }
        const u32 state = node.bits & kStateBits;
        expect(is_used(node.parent), "parent of a node is gone", id);
        const Node& parent = at(node.parent);
        ++children[node.parent];
        ++extra_uses[node.extra];
        ++seen.nodes;
        seen.device += (state & kDevice) != 0;
        seen.host += (state & kHost) != 0;
        seen.loading += (state & kLoading) != 0;
        seen.offloading += (state & kOffloading) != 0;
        seen.referenced += node.refs != 0;
        expect(state != 0 || node.refs != 0 || node.children != 0, "node that nothing keeps", id);
        expect((node.block != kNil) == ((state & (kDevice | kLoading)) != 0), "device block without a reason", id);
        expect((state & (kDevice | kLoading)) != (kDevice | kLoading), "loading although resident", id);
        expect((state & kOffloading) == 0 || ((state & kDevice) != 0 && node.pending != 0), "offload without a block", id);
        expect(node.pending == 0 || (state & kDevice) != 0, "copy from a block the node lost", id);
        expect(node.refs == 0 || (parent.bits & kRoot) != 0 || parent.refs != 0, "unreferenced above a referenced", id);
        const bool evictable = is_firm(node) && node.refs == 0 && !retired_;
        expect(((node.bits & kListed) != 0) == evictable && (place[id] != 0) == evictable, "evictable", id);
        if (place[id] != 0 && place[node.parent] != 0) expect(place[node.parent] > place[id], "order of the list", id);
        if (is_firm(node) && !retired_) expect((parent.bits & kRoot) != 0 || is_firm(parent), "hole above", id);
        expect(find_name(node.name) == id, "table of names", id);
        expect(find_child(node.parent, node.extra, tokens_of(id), kNil) == id, "table of children", id);
        const std::string& extra = extras_[node.extra].bytes;
        Key name;
        hasher.name(parent.name, tokens_of(id), reinterpret_cast<const u8*>(extra.data()), u32(extra.size()), name);
        expect(name == node.name, "name", id);
    }
    for (u32 id = 0; id < next_id_; ++id)
        if (is_used(id)) expect(children[id] == at(id).children, "number of children", id);
    for (u32 id = 0; id < next_id_; ++id)
        if (is_used(id) && (at(id).bits & kRoot) != 0) expect(children[id] != 0, "root without children", id);
    for (u32 id = 1; id < extras_.size(); ++id) expect(extra_uses[id] == extras_[id].uses, "uses of an extra key", id);
    expect(seen.nodes + roots + free == next_id_ && roots == roots_.size(), "number of nodes", next_id_);
    expect(seen.nodes == counts_.nodes && seen.device == counts_.device && seen.host == counts_.host &&
               seen.evictable == counts_.evictable && seen.referenced == counts_.referenced &&
               seen.loading == counts_.loading && seen.offloading == counts_.offloading &&
               children_.used() == seen.nodes && names_.used() == seen.nodes,
           "counts", 0);
}

}  // namespace kvactors
