// The step lock is granted in the order of requests: a loop that retakes it at once cannot starve other threads.
#include "engine/ticket_lock.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace kvanta::engine {
namespace {

TEST(TicketLock, IsGrantedInTheOrderOfRequests) {
  constexpr int kWaiters = 5;
  TicketLock ticket_lock;
  std::mutex mutex;
  std::vector<int> order;
  std::unique_lock lock(mutex);
  ticket_lock.Lock(lock);
  std::vector<std::jthread> waiters;
  for (int waiter = 0; waiter < kWaiters; ++waiter) {
    waiters.emplace_back([&, waiter] {
      std::unique_lock own(mutex);
      ticket_lock.Lock(own);
      order.push_back(waiter);
      ticket_lock.Unlock();
    });
    while (ticket_lock.Waiting() <= waiter) {
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    }
  }
  ticket_lock.Unlock();
  EXPECT_TRUE(ticket_lock.Held()) << "handed over to a thread that has not woken up yet";
  ticket_lock.Lock(lock);  // as the loop does: after everyone who waits
  EXPECT_EQ(order, (std::vector{0, 1, 2, 3, 4}));
  ticket_lock.Unlock();
  EXPECT_FALSE(ticket_lock.Held());
}

}  // namespace
}  // namespace kvanta::engine
