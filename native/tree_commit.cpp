// Commit: makes computed blocks shareable, and hands blocks of finished loads to the paths that
// waited for them.
#include <stdexcept>

#include "tree.hpp"

namespace kvactors {

// Why the blocks before `upto` cannot be committed, nullptr if they can.
const char* Tree::commit_refusal(const Path& path, u32 upto) const {
    for (u32 i = path.committed; i < upto; ++i) {
        if (i >= path.table.size() || path.table[i] == kNil) return "commit of a position without a device block";
        // The table still has the target of a failed load, and `settle` must run first.
        if (path.shared[i] != 0 && at(path.nodes[i]).block != path.table[i])
            return "commit of a position whose load has failed and was not settled";
    }
    return nullptr;
}

Committed Tree::commit(Path& path, u32 upto) {
    require(path);
    if (upto > path.full_blocks()) throw std::invalid_argument("commit beyond the full blocks of the path");
    if (const char* refusal = commit_refusal(path, upto)) throw std::invalid_argument(refusal);
    Committed result{path.committed, path.committed, {}};
    if (retired_ || is_forgotten(path)) return result;
    path.make_room();
    for (u32 i = path.committed; i < upto; ++i) {
        if (i == path.held()) {
            const u32 child = find_block(path, i, node_above(path, i));
            path.tree = serial_;
            if (child == kNil) {
                create(path, i, path.flat ? i + 1 : upto);  // every descendant of a new node is new
            } else {
                if ((at(child).bits & kLoading) != 0) break;
                if (i == path.names.size() && at(child).named != 0) path.names.push_back(given_name(child));
                path.nodes.push_back(child);
                acquire(child);
            }
        }
        const u32 id = path.nodes[i];
        if ((at(id).bits & kLoading) != 0) break;
        adopt(path, i, id, result);
        path.committed = result.stop = i + 1;
    }
    return result;
}

// The full blocks among the first `tokens` tokens, without other consequences: none of them is on the
// host. known: only if they are committed already. Returns the committed blocks. Otherwise nothing
// has changed.
std::optional<u32> Tree::commit_tokens(Path& path, long long tokens, bool known) {
    require(path);
    const std::size_t covered = path.table.size() * std::size_t(block_size_);
    if (tokens < 0 || std::size_t(tokens) > std::min(covered, path.tokens.size())) return std::nullopt;
    const u32 upto = u32(std::size_t(tokens) / block_size_);
    if (upto > path.committed) {
        if (known || retired_ || is_forgotten(path) || counts_.host != 0) return std::nullopt;
        commit(path, upto);
    }
    return path.committed;
}

// What a step of a path takes, nothing if only an extend or a commit of its own can tell why it
// cannot be carried out. computed: tokens to commit, counted with the added ones, below 0 for none.
std::optional<StepWork> Tree::plan_step(const Path& path, std::size_t added, long long computed) const {
    const std::size_t tokens = path.tokens.size() + added, covered = path.table.size();
    if (path.block_size != block_size_ || (!path.nodes.empty() && path.tree != serial_)) return std::nullopt;
    if (covered * block_size_ < path.tokens.size() || computed > (long long)(tokens)) return std::nullopt;
    StepWork work{u32((tokens + block_size_ - 1) / block_size_), 0};
    work.blocks -= std::min(work.blocks, u32(covered));
    const u32 upto = computed < 0 ? 0 : u32(std::size_t(computed) / block_size_);
    if (upto <= path.committed || retired_ || is_forgotten(path)) return work;
    if (commit_refusal(path, std::min(upto, u32(covered))) != nullptr) return std::nullopt;
    work.entered = upto - path.committed;
    return work;
}

// Commits one position. A resident node keeps its own block and the path's stays private. Any other
// node takes the path's block.
void Tree::adopt(Path& path, u32 position, u32 id, Committed& result) {
    Node& node = at(id);
    if ((node.bits & kDevice) != 0) {
        stay(id, node);
        return;
    }
    if (hosted(node)) result.adopted.push_back(position);
    take_device(id, path.table[position]);
    path.shared[position] = 1;
}

u32 Tree::settle(Path& path) {
    require(path);
    u32 i = path.committed;
    while (i < path.held() && i < path.table.size()) {
        const Node& node = at(path.nodes[i]);
        if (!is_firm(node) || node.block != path.table[i]) break;
        ++i;
    }
    path.committed = i;
    for (; i < path.table.size(); ++i)
        if (path.shared[i] != 0 && at(path.nodes[i]).block != path.table[i]) path.shared[i] = 0;
    return path.committed;
}

void Tree::replace(Path& path, u32 position, u32 block) {
    require(path);
    if (position < path.committed) throw std::invalid_argument("cannot replace a committed block");
    if (position >= path.table.size()) throw std::invalid_argument("position beyond the end of the block table");
    path.put(position, block, false);
}

}  // namespace kvactors
