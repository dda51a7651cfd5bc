// The table of nodes beside a map, with hashes that collide, while it grows in steps.
#include "table.hpp"

#undef NDEBUG
#include <cassert>
#include <random>
#include <unordered_map>

using namespace kvactors;

namespace {

// values: different hashes. Few of them make long probes that wrap around the end.
void the_table_is_a_map(unsigned seed, u32 values, std::size_t capacity, unsigned most) {
    std::mt19937 random(seed);
    Table table(capacity, false);
    std::unordered_map<u32, u32> model;  // hash by id
    const auto hash_of = [&] { return u32(0) - random() % values; };
    const auto has = [&](u32 hash, u32 id) {
        return table.find(hash, [&](u32 each) {
            assert(each < most);
            return each == id;
        }) == id;
    };
    for (unsigned step = 0; step < 6000; ++step) {
        const bool growing = step / most % 2 == 0;
        const u32 id = random() % most;
        const auto found = model.find(id);
        if (found == model.end() && (growing || random() % 4 == 0)) {
            table.insert(model[id] = hash_of(), id);
        } else if (found != model.end() && (!growing || random() % 4 == 0)) {
            table.erase(found->second, id);
            model.erase(found);
        }
        assert(table.used() == model.size());
        if (step % 61 == 0) {
            for (u32 each = 0; each < most; ++each) {
                const auto one = model.find(each);
                if (one != model.end()) assert(has(one->second, each));
                else assert(!has(u32(0) - each % values, each));
            }
        }
    }
    assert(table.drop() && !table.drop());
}

}  // namespace

int main() {
    for (unsigned seed = 0; seed < 12; ++seed)
        for (const u32 values : {3u, 40u, 1u << 30})
            for (const std::size_t capacity : {0, 100}) the_table_is_a_map(seed, values, capacity, 64u << seed % 4);
}
