// The tree under sanitizers: known hashes, and random paths, loads and evictions with every
// invariant checked.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "sha256.hpp"
#include "tokens.hpp"
#include "tree.hpp"

using namespace kvactors;

#define CHECK(what)                                                         \
    do {                                                                    \
        if (!(what)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what); \
            std::exit(1);                                                   \
        }                                                                   \
    } while (0)

namespace {

std::string hex(const Key& key) {
    std::string text;
    char two[3];
    for (u8 byte : key.bytes) {
        std::snprintf(two, sizeof two, "%02x", byte);
        text += two;
    }
    return text;
}

void test_sha256() {
    const u8* abc = reinterpret_cast<const u8*>("abc");
    for (bool portable : {false, true}) {
        CHECK(hex(sha256(abc, 3, portable)) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        CHECK(hex(sha256(abc, 0, portable)) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    }
    std::vector<u8> bytes(1000, 7);
    for (std::size_t n = 0; n < bytes.size(); n += 13) CHECK(sha256(bytes.data(), n) == sha256(bytes.data(), n, true));
}

void test_narrow() {
    const std::int64_t good[] = {0, 1, 4294967295LL}, bad[] = {0, -1, 5}, large[] = {4294967296LL, 0, 0};
    u32 out[3];
    CHECK(narrow(IntKind::i64, good, 8, 3, out) && out[2] == 4294967295u);
    CHECK(!narrow(IntKind::i64, bad, 8, 3, out));
    CHECK(!narrow(IntKind::i64, large, 8, 3, out));
    CHECK(narrow(IntKind::i64, good + 2, -8, 3, out) && out[0] == 4294967295u && out[2] == 0);
}

struct Load {
    std::vector<u32> nodes, targets;
};

// One tree, a pool of device blocks, and every operation on them in random order.
class Life {
public:
    Life(unsigned seed, std::shared_ptr<LifeTables> retain) : random_(seed), tree_(2, 8, true, std::move(retain), seed % 3 == 0) {
        for (u32 b = 0; b < 64; ++b) free_.push_back(b);
    }

    void step() {
        switch (random_() % 7) {
            case 0: case 1: begin(); break;
            case 2: commit(); break;
            case 3: release(); break;
            case 4: evict(); break;
            case 5: end_evict(); break;
            case 6: end_load(); break;
        }
        if (tree_.retired()) sweep(random_() % 3);
        tree_.check();
    }

    void retire() {
        const std::size_t unused = tree_.retire();
        CHECK(unused == tree_.returning());
    }

    void finish() {
        while (!loads_.empty()) end_load();
        while (!evictions_.empty()) end_evict();
        while (!paths_.empty()) release();
        if (!tree_.retired()) retire();
        sweep(64);
        CHECK(tree_.idle());
        while (!tree_.dismantle()) {
        }
        tree_.check();
        CHECK(tree_.statistics().nodes == 0);
        CHECK(std::set<u32>(free_.begin(), free_.end()).size() == 64 && free_.size() == 64);
    }

private:
    void give(const std::vector<u32>& blocks) { free_.insert(free_.end(), blocks.begin(), blocks.end()); }

    void sweep(std::size_t count) {
        const std::size_t before = tree_.returning();
        const std::vector<u32> freed = tree_.sweep(count);
        CHECK(freed.size() == std::min(count, before) && tree_.returning() == before - freed.size());
        give(freed);
    }

    void begin() {
        if (paths_.size() >= 4) return;
        Key root{};
        root.bytes[0] = u8(random_() % 2);
        Path path(2, root);
        const std::size_t blocks = 1 + random_() % 5;
        for (std::size_t i = 0; i < 2 * blocks; ++i) path.tokens.push_back(u32(random_() % 2));
        if (random_() % 4 == 0) path.set_extra(0, "picture");
        tree_.advance(now_ += double(random_() % 8) * 0.3);
        const Match match = tree_.pin(path, 0xffffffffu);
        give(tree_.trim(path, match.device_run));
        const std::size_t need = blocks - match.device_run;
        if (free_.size() < need) {
            give(tree_.release(path));
            return;
        }
        std::vector<u32> own(free_.end() - std::ptrdiff_t(need), free_.end());
        free_.resize(free_.size() - need);
        path.table.resize(path.held());
        path.shared.resize(path.held());
        path.assign(match.device_run, own.data(), own.size());
        paths_.push_back(std::move(path));
        if (random_() % 2 == 0) load(paths_.back(), match.device_run, u32(blocks));
    }

    void load(Path& path, u32 start, u32 stop) {
        if (start == stop) return;
        try {
            Load made{tree_.begin_load(path, start, stop), {}};
            loads_.push_back(std::move(made));
        } catch (const std::invalid_argument&) {
            return;  // another path loads one of the blocks
        }
    }

    void commit() {
        if (paths_.empty()) return;
        Path& path = paths_[random_() % paths_.size()];
        try {
            tree_.commit(path, path.full_blocks());
        } catch (const std::invalid_argument&) {
            return;  // a failed load that is not settled yet
        }
    }

    void release() {
        if (paths_.empty()) return;
        const std::size_t which = random_() % paths_.size();
        std::swap(paths_[which], paths_.back());
        if (random_() % 4 != 0 && !tree_.retired()) {
            tree_.advance(now_ += double(random_() % 8) * 0.3);
            tree_.touch(paths_.back(), random_() % 2 == 0 ? -1 : 100);
        }
        give(tree_.release(paths_.back()));
        paths_.pop_back();
    }

    void evict() {
        const bool with_names = random_() % 2 == 0;
        Evicted picked = tree_.evict(1 + random_() % 4, with_names);
        CHECK(picked.keys.size() == (with_names ? picked.nodes.size() : 0));
        if (!picked.nodes.empty()) evictions_.push_back(picked.nodes);
    }

    void end_evict() {
        if (evictions_.empty()) return;
        const std::vector<u32> nodes = evictions_.front();
        evictions_.pop_front();
        std::vector<u8> host(nodes.size());
        for (u8& flag : host) flag = u8(random_() % 2);
        give(tree_.finish_offload(nodes.data(), nodes.size(), host.data()).freed);
        if (random_() % 3 == 0) tree_.clear_host(), tree_.sweep_host(random_() % 40);
    }

    void end_load() {
        if (loads_.empty()) return;
        const Load load = loads_.front();
        loads_.pop_front();
        const std::vector<u32> lost = tree_.finish_load(load.nodes.data(), load.nodes.size(), random_() % (load.nodes.size() + 1));
        std::set<u32> orphans(lost.begin(), lost.end());
        for (Path& path : paths_) {
            tree_.settle(path);
            // Its owner has it in its table again.
            for (u32 block : path.table) orphans.erase(block);
        }
        give(std::vector<u32>(orphans.begin(), orphans.end()));
    }

    std::mt19937 random_;
    double now_ = 0;
    Tree tree_;
    std::vector<u32> free_;
    std::vector<Path> paths_;
    std::deque<Load> loads_;
    std::deque<std::vector<u32>> evictions_;
};

}  // namespace

int main() {
    test_sha256();
    test_narrow();
    for (unsigned seed = 0; seed < 80; ++seed) {
        // Under LRU, RETAIN and RETAIN with an inverted index.
        Life life(seed, seed < 40 ? nullptr : std::make_shared<LifeTables>(seed >= 60));
        for (int i = 0; i < 400; ++i) {
            if (seed % 2 == 1 && i == 300) life.retire();
            life.step();
        }
        life.finish();
    }
    std::puts("ok");
}
