// Listings of the whole tree, for tests and tools.
#include "tree.hpp"

namespace kvactors {
// What a retired tree still lists is not evictable: it is on its way back.
Statistics Tree::statistics() const {
    Statistics result = counts_;
    if (retired_) result.evictable = 0;
    return result;
}

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
            leaf.states.push_back(char(state(at(chain[i]))));
        }
        result.push_back(std::move(leaf));
    }
    return result;
}

std::size_t Tree::bytes() const {
    return sizeof(*this) + nodes_.bytes() + tokens_.bytes() + children_.bytes() + names_.bytes();
}

Listing Tree::listing(u32 start, std::size_t count) const {
    Listing result;
    u32 id = start;
    for (; id < next_id_ && result.keys.size() < count; ++id) {
        if (!is_node(id)) continue;
        result.keys.push_back(at(id).name);
        result.states.push_back(char(state(at(id))));
    }
    result.next = id < next_id_ ? id : kNil;
    return result;
}

}  // namespace kvactors
