// Numbers that are used again beside a set of the free ones.
#include "places.hpp"

#undef NDEBUG
#include <cassert>
#include <random>
#include <set>

using namespace kvactors;

namespace {

void the_next_free_number_is_taken(unsigned seed, std::size_t least, unsigned most) {
    std::mt19937 random(seed);
    Places places(least);
    std::set<u32> free, used;
    std::size_t size = 0;
    u32 after = 0;  // the number after the last one that was used again
    for (unsigned step = 0; step < 5000; ++step) {
        const bool growing = step / 300 % 2 == 0;
        if (used.size() < most && (used.empty() || random() % 3 < (growing ? 2u : 1u))) {
            u32 expected = u32(size);
            if (!free.empty() && size >= least) {
                const auto next = free.lower_bound(after);
                expected = next == free.end() ? *free.begin() : *next;
                after = expected + 1;
            }
            const u32 taken = places.take();
            assert(taken == expected);
            size += taken == size;
            free.erase(taken);
            assert(used.insert(taken).second);
        } else {
            auto one = used.begin();
            std::advance(one, random() % used.size());
            places.give(*one);
            free.insert(*one);
            used.erase(one);
        }
        assert(places.size() == size && places.used() == used.size());
    }
}

}  // namespace

int main() {
    for (unsigned seed = 0; seed < 8; ++seed)
        for (const std::size_t least : {0, 1, 64, 200}) the_next_free_number_is_taken(seed, least, 10u << seed % 5);
}
