// Ranks on one machine or several, connected by Gloo over TCP.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "parallel/communicator.h"

namespace kvanta::parallel {

struct GlooConfig {
  int rank = 0;
  int size = 2;
  std::string folder;  // in which ranks find each other; private to the group, with copies on other machines
  std::string address = "127.0.0.1";  // this machine's address, to listen at
  bool other_machines = false;        // ranks are on several
  std::string identity;               // identity of build, model and options; all ranks must have the same
  bool busy_poll = true;              // receives without sleeping: for ranks that have their CPUs to themselves
  std::chrono::milliseconds timeout = std::chrono::minutes(2);  // limit for ranks that live but do not answer
};

// Waits until all ranks have joined. Throws InputError for ranks that differ, RankLostError for one that ends before or
// while they connect, and ResourceError for one that does not come.
std::unique_ptr<Communicator> JoinGloo(const GlooConfig& config);

// The reason for which JoinGloo fails in this build; empty: it can succeed.
std::string MissingForGloo();

}  // namespace kvanta::parallel
