"""Output for users and programs: tables, JSON, a live screen and errors. The modules of this
package make no requests.
"""
